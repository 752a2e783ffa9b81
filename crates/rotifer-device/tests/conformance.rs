//! The CPU device against the conformance suite, with one thread and with three.

mod common;

use common::*;
use rotifer_device::{CpuDevice, Device};

/// Runs a check on two devices at once, which must agree to the bit.
fn with_1_and_3_threads(check: impl FnOnce(&[&dyn Device]) + Send) {
    let run = CpuDevice::run(3, |three| check(&[&CpuDevice::new(1), three]));
    run.expect("the system has threads to spare");
}

#[test]
fn fill_copy_and_add_are_exact() {
    with_1_and_3_threads(data::check_fill_copy_add);
    data::check_doubles(&CpuDevice::new(1));
}

#[test]
fn matmul_matches_reference_any_strides() {
    with_1_and_3_threads(linear::check_matmul);
}

#[test]
fn matmul_takes_columns_of_the_matrix_it_writes_to() {
    with_1_and_3_threads(linear::check_matmul_within_one_matrix);
}

#[test]
fn bias_matches_reference_any_strides() {
    with_1_and_3_threads(linear::check_bias);
    with_1_and_3_threads(linear::check_bias_backward);
}

#[test]
fn norm_matches_reference_any_strides() {
    with_1_and_3_threads(norm::check_norm);
}

#[test]
fn norm_backward_matches_reference_any_strides() {
    with_1_and_3_threads(norm::check_norm_backward);
}

#[test]
fn activation_matches_reference_in_place_or_not() {
    with_1_and_3_threads(elementwise::check_activation);
}

#[test]
fn gated_matches_reference_in_place_or_not() {
    with_1_and_3_threads(elementwise::check_gated);
}

#[test]
fn attention_matches_reference_any_mask() {
    with_1_and_3_threads(attention::check_attention);
}

#[test]
fn rotary_matches_reference_far_positions() {
    with_1_and_3_threads(attention::check_rotary);
}

#[test]
fn embedding_matches_reference_any_part_of_the_table() {
    with_1_and_3_threads(tokens::check_embedding);
}

#[test]
fn joined_states_are_the_state_of_all_classes() {
    with_1_and_3_threads(tokens::check_loss_join);
}

#[test]
fn loss_matches_reference_any_blocks() {
    with_1_and_3_threads(tokens::check_loss);
}

#[test]
fn adamw_matches_reference() {
    with_1_and_3_threads(optimizer::check_adamw);
}

#[test]
fn sgd_matches_reference() {
    with_1_and_3_threads(optimizer::check_sgd);
}

#[test]
fn squared_norm_matches_reference() {
    with_1_and_3_threads(optimizer::check_squared_norm);
}

#[test]
fn random_pieces_equal_the_whole() {
    with_1_and_3_threads(random::check_pieces_equal_the_whole);
}

#[test]
fn random_streams_are_independent() {
    random::check_streams_are_independent(&CpuDevice::new(1));
}

#[test]
fn normal_is_normal() {
    random::check_normal_distribution(&CpuDevice::new(1));
}

#[test]
fn uniform_is_uniform_and_below_its_end() {
    random::check_uniform_distribution(&CpuDevice::new(1));
}

#[test]
fn dropout_matches_reference() {
    with_1_and_3_threads(random::check_dropout);
}

#[test]
fn dropout_keeps_its_rate_and_its_mask() {
    random::check_dropout_rate(&CpuDevice::new(1));
}

#[test]
fn kernels_refuse_broken_operands() {
    refusals::check_refusals(&CpuDevice::new(1), &CpuDevice::new(1));
}
