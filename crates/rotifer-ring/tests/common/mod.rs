//! Ranks with some memory each.

#![allow(dead_code, missing_docs, reason = "shared by test binaries that each use a part")]

pub mod uses;

use std::time::Duration;

use rotifer_device::{Arena, CpuDevice, Device, Dtype, Purpose, Region};
use rotifer_ring::schedule::Pass;
use rotifer_ring::{Comm, Error, Hop, HopMode, Lane, Result, Tag, launch};

pub const MODES: [HopMode; 2] = [HopMode::HandOver, HopMode::Copy];
pub const PASSES: [Pass; 2] = [Pass::Forward, Pass::Backward];
pub const LANES: [Lane; 2] = [Lane::Weights, Lane::Gradients];

/// A deadline that no correct run meets, however busy the machine.
pub const PATIENT: Duration = Duration::from_secs(60);

pub fn options(ranks: usize, hop_mode: HopMode, deadline: Duration) -> launch::Options {
    launch::Options { hop_mode, deadline, ..launch::Options::new(ranks) }
}

/// Runs `f` on every rank, each with a device; all must succeed.
pub fn on_ranks<T: Send>(
    ranks: usize,
    hop_mode: HopMode,
    f: impl Fn(&Comm, &dyn Device) -> Result<T> + Sync,
) -> Vec<T> {
    on_ranks_within(PATIENT, ranks, hop_mode, f)
        .unwrap_or_else(|failure| panic!("{ranks} ranks, {hop_mode:?}: {failure}"))
}

pub fn on_ranks_within<T: Send>(
    deadline: Duration,
    ranks: usize,
    hop_mode: HopMode,
    f: impl Fn(&Comm, &dyn Device) -> Result<T> + Sync,
) -> Result<Vec<T>, launch::Failure<Error>> {
    launch::threads(&options(ranks, hop_mode, deadline), |comm| f(&comm, &CpuDevice::new(1)))
}

/// Zeroed regions of these lengths, in memory that all ranks have attached. A collective.
pub fn regions<const N: usize>(
    comm: &Comm,
    dev: &dyn Device,
    dtype: Dtype,
    lens: [usize; N],
) -> Result<[Region; N]> {
    let take = |arena: &mut Arena| lens.map(|len| arena.take(Purpose::Travel, dtype, len));
    let mut counting = Arena::counting();
    take(&mut counting);
    let mut arena = Arena::live(dev, &counting.plan()).expect("little memory");
    let taken = take(&mut arena);
    comm.share(dev, arena.memory().expect("a live arena has memory"))?;
    Ok(taken)
}

pub fn read_f32(dev: &dyn Device, x: Region) -> Vec<f32> {
    let mut values = vec![0.0; x.len()];
    dev.read_f32(x, &mut values);
    values
}

pub fn read_f64(dev: &dyn Device, x: Region) -> Vec<f64> {
    let mut values = vec![0.0; x.len()];
    dev.read_f64(x, &mut values);
    values
}

pub fn tag(pass: Pass, step: usize, lane: Lane) -> Tag {
    Tag { unit: 0, pass, step: u32::try_from(step).unwrap(), lane }
}

/// Numbers of mixed size and sign, so that the order of a sum shows in its last bits.
pub fn noise(rank: usize, i: usize) -> f64 {
    let z = ((rank as u64 + 1) * 0x9e37_79b9_7f4a_7c15) ^ (i as u64 * 0xd1b5_4a32_d192_ed03);
    let z = (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((z >> 11) as f64 / (1_u64 << 53) as f64 - 0.5) * f64::powi(10.0, (z % 7) as i32)
}

/// [`Comm::start`], for tests.
pub fn start(
    comm: &Comm,
    dev: &dyn Device,
    tag: Tag,
    send: Region,
    expect: usize,
    into: Option<Region>,
) -> Result<Hop> {
    // SAFETY: tests write to a region before they hand it on and, in hand-over mode, leave it alone
    // until the ranks have met again.
    unsafe { comm.start(dev, tag, send, expect, into) }
}

/// Worlds that faults have hidden in: none, even, odd, more than two, more than shards divide by.
pub const WORLDS: [usize; 5] = [1, 2, 3, 4, 7];

/// The values of [`noise`] of `len` elements, as they are kept.
pub fn noise_f32(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| noise(rank, i) as f32).collect()
}

/// Sums over the ranks of what `of` says that each has, in the order of ranks.
pub fn sum_of(world: usize, of: impl Fn(usize) -> Vec<f32>) -> Vec<f32> {
    let add = |mut sum: Vec<f32>, rank| {
        sum.iter_mut().zip(of(rank)).for_each(|(s, x)| *s += x);
        sum
    };
    (1..world).fold(of(0), add)
}

/// The first failure of a run that must fail, which nothing else may have caused: its rank, and
/// what it said. Units are called `wte`, `h.0.attn` and `h.0.mlp`.
pub fn failure(
    deadline: Duration,
    world: usize,
    mode: HopMode,
    f: impl Fn(&Comm, &dyn Device) -> Result<()> + Sync,
) -> (usize, String) {
    let named = |comm: &Comm, dev: &dyn Device| {
        comm.name_units(["wte", "h.0.attn", "h.0.mlp"].map(String::from).to_vec());
        f(comm, dev)
    };
    match on_ranks_within(deadline, world, mode, named) {
        Err(launch::Failure::Failed { rank, cause }) => {
            assert!(!cause.is_consequence(), "{cause}");
            (rank, cause.to_string())
        }
        other => panic!("{other:?}"),
    }
}
