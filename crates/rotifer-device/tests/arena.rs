//! What the arena promises: the counting pass is the live pass, to the byte, and scopes share.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rotifer_device::{Arena, CpuDevice, Dtype, MemoryPlan, Purpose, Region};

/// Smallest size of a region: each starts on a line of its own.
const LINE: usize = 64;

/// A model in little: two layers of which each has scratch of its own and a part with more.
#[derive(Debug)]
struct Model {
    stay: Vec<Region>,
    /// Scratch of each layer, and of the part within it.
    layers: [[Region; 2]; 2],
}

fn build(arena: &mut Arena) -> Model {
    let weights = arena.take(Purpose::Weights, Dtype::F32, 37);
    let layer = |arena: &mut Arena, own: usize, inner: usize| {
        arena.scope(|arena| {
            let own = arena.scratch(Dtype::F32, own);
            [own, arena.scope(|arena| arena.scratch(Dtype::F64, inner))]
        })
    };
    let first = layer(arena, 100, 3);
    // What stays may be asked for between scopes.
    let ids = arena.take(Purpose::Activations, Dtype::I32, 1);
    let second = layer(arena, 5, 70);
    let travel = arena.take(Purpose::Travel, Dtype::Bf16, 33);
    let loss = arena.take(Purpose::Activations, Dtype::F64, 1);
    let nothing = arena.take(Purpose::Gradients, Dtype::F32, 0);
    Model { stay: vec![weights, ids, travel, loss, nothing], layers: [first, second] }
}

fn counted() -> MemoryPlan {
    let mut counting = Arena::counting();
    build(&mut counting);
    counting.plan()
}

fn live(device: &CpuDevice) -> (Model, Arena) {
    let mut arena = Arena::live(device, &counted()).expect("little memory");
    (build(&mut arena), arena)
}

#[test]
fn live_pass_takes_what_was_counted() {
    let (model, arena) = live(&CpuDevice::new(1));
    assert_eq!(arena.plan(), counted());
    let memory = arena.memory().expect("a live arena has memory");
    assert_eq!(memory.bytes(), counted().total());
    assert_eq!(model.stay.iter().map(Region::len).collect::<Vec<_>>(), [37, 1, 33, 1, 0]);
    assert!(Arena::counting().memory().is_none());
}

#[test]
fn plan_adds_up_by_purpose() {
    let plan = counted();
    assert_eq!(plan.bytes(Purpose::Weights), 3 * LINE);
    assert_eq!(plan.bytes(Purpose::Activations), 2 * LINE);
    assert_eq!(plan.bytes(Purpose::Travel), 2 * LINE);
    assert_eq!(plan.bytes(Purpose::Gradients), 0);
    // The larger of the layers: 7 lines and 1, or 1 line and 9.
    assert_eq!(plan.bytes(Purpose::Scratch), 10 * LINE);
    assert_eq!(plan.total(), 17 * LINE);
}

#[test]
fn scopes_share_and_parents_do_not_share_with_children() {
    let (model, _arena) = live(&CpuDevice::new(1));
    let [first, second] = model.layers;
    assert!(first[0].overlaps(&second[0]) && first[0].overlaps(&second[1]));
    assert!(!first[0].overlaps(&first[1]) && !second[0].overlaps(&second[1]));
    let scratch = model.layers.as_flattened();
    for (i, region) in model.stay.iter().enumerate() {
        let others = model.stay[i + 1..].iter().chain(scratch);
        assert!(others.into_iter().all(|other| !region.overlaps(other)), "{region:?}");
    }
}

#[test]
fn scope_without_a_closure_gives_back_what_was_taken() {
    let mut arena = Arena::counting();
    let kept = arena.scratch(Dtype::F32, 16);
    let scope = arena.open_scope();
    let first = arena.scratch(Dtype::F32, 16);
    arena.close_scope(scope);
    assert!(first.overlaps(&arena.scratch(Dtype::F32, 16)) && !first.overlaps(&kept));
    assert_eq!(arena.plan().total(), 2 * LINE);
}

#[test]
fn regions_are_aligned_and_apart_by_lines() {
    // A region's place shows in its Debug form, `type[length] at memory+offset`, and nowhere else.
    let (model, _arena) = live(&CpuDevice::new(1));
    for region in model.stay.iter().chain(model.layers.as_flattened()) {
        let text = format!("{region:?}");
        let (_, offset) = text.rsplit_once('+').expect("a place");
        let offset: usize = offset.parse().expect("an offset");
        assert_eq!(offset % LINE, 0, "{text}");
    }
}

#[test]
fn memory_starts_zeroed() {
    let device = CpuDevice::new(1);
    let (_, _arena) = live(&device);
    let mut counting = Arena::counting();
    counting.take(Purpose::Weights, Dtype::F32, 100_000);
    let mut arena = Arena::live(&device, &counting.plan()).expect("little memory");
    let region = arena.take(Purpose::Weights, Dtype::F32, 100_000);
    let mut values = vec![1.0; region.len()];
    rotifer_device::Device::read_f32(&device, region, &mut values);
    assert!(values.iter().all(|x| x.to_bits() == 0));
}

#[test]
fn more_than_counted_is_refused() {
    let device = CpuDevice::new(1);
    let refused = |more: fn(&mut Arena) -> Region| {
        let (_, mut arena) = live(&device);
        catch_unwind(AssertUnwindSafe(|| more(&mut arena))).is_err()
    };
    assert!(refused(|arena| arena.take(Purpose::Weights, Dtype::F32, 1)));
    assert!(refused(|arena| arena.scratch(Dtype::F32, 10 * 16 + 1)));
    assert!(!refused(|arena| arena.scratch(Dtype::F32, 10 * 16)));
    let mut counting = Arena::counting();
    let take = || counting.take(Purpose::Scratch, Dtype::F32, 1);
    assert!(catch_unwind(AssertUnwindSafe(take)).is_err(), "scratch outside a scope");
}

#[test]
fn scopes_close_in_reverse_order() {
    let mut arena = Arena::counting();
    let outer = arena.open_scope();
    arena.scratch(Dtype::F32, 1);
    let inner = arena.open_scope();
    arena.close_scope(outer);
    assert!(catch_unwind(AssertUnwindSafe(|| arena.close_scope(inner))).is_err());
}

#[test]
fn region_parts_stay_within() {
    let region = Arena::counting().take(Purpose::Weights, Dtype::F32, 10);
    assert_eq!((region.slice(3..7).len(), region.first(0).len(), region.bytes()), (4, 0, 40));
    assert!(!region.slice(0..5).overlaps(&region.slice(5..10)));
    assert!(region.slice(0..6).overlaps(&region.slice(5..10)));
    assert_eq!(region.cast(Dtype::I32).dtype(), Dtype::I32);
    assert!(catch_unwind(AssertUnwindSafe(|| region.slice(3..11))).is_err());
    assert!(catch_unwind(AssertUnwindSafe(|| region.cast(Dtype::F64))).is_err());
}
