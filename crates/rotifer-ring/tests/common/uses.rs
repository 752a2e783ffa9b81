//! A small model's gradients and weights, without the model: units of uneven size, some of one
//! element or none.

#![allow(dead_code, missing_docs, reason = "shared by test binaries that each use a part")]

use rotifer_device::{Arena, Device, Dtype, Purpose, Region};
use rotifer_ring::schedule::{Cut, Pass};
use rotifer_ring::{Bucket, Comm, Gather, Gathering, Parts, Replicas, Result, Spares};

use super::{noise_f32, read_f32};

/// Rows of each unit, and the widths of its tensors: less rows than ranks, none, and more.
pub const UNITS: [(usize, &[usize]); 4] = [(20, &[5, 1, 3]), (0, &[4]), (3, &[2]), (11, &[1, 7])];

pub fn parts(unit: usize, world: usize) -> Parts {
    let (rows, widths) = UNITS[unit];
    Parts::new(Cut::in_groups(rows, world, usize::MAX), 0, widths.into())
}

/// The elements of the whole that are rank `rank`'s, one tensor behind the other.
pub fn part_of(parts: &Parts, rank: usize, whole: &[f32]) -> Vec<f32> {
    parts.segments(rank).flat_map(|(range, _)| whole[range].to_vec()).collect()
}

/// Memory that `take` asks for, known to all ranks. A collective.
pub fn shared<T>(
    comm: &Comm,
    dev: &dyn Device,
    take: impl Fn(&mut Arena) -> T,
) -> Result<(Arena, T)> {
    let mut counting = Arena::counting();
    take(&mut counting);
    let mut arena = Arena::live(dev, &counting.plan()).expect("little memory");
    let taken = take(&mut arena);
    comm.share(dev, arena.memory().expect("a live arena has memory"))?;
    Ok((arena, taken))
}

fn number(unit: usize) -> u32 {
    u32::try_from(unit).expect("few units")
}

/// A bucket per unit, each waiting for two contributions, but the last for none; with the work of
/// the optimiser shared or not. Weights lie behind gradients.
pub fn replicas(
    comm: &Comm,
    dev: &dyn Device,
    overlap: bool,
    is_shared: bool,
) -> Result<(Arena, Vec<Bucket>, Replicas)> {
    let world = comm.world();
    let (arena, buckets) = shared(comm, dev, |arena| {
        let bucket = |unit| {
            let parts = parts(unit, world);
            let gradients = arena.take(Purpose::Gradients, Dtype::F32, parts.len());
            let weights = arena.take(Purpose::Weights, Dtype::F32, parts.len());
            let shared = is_shared.then_some((parts, weights));
            let contributions = if unit + 1 == UNITS.len() { 0 } else { 2 };
            Bucket { unit: number(unit), gradients, shared, contributions }
        };
        (0..UNITS.len()).map(bucket).collect::<Vec<_>>()
    })?;
    let replicas = Replicas::new(comm.clone(), overlap, buckets.clone());
    Ok((arena, buckets, replicas))
}

/// How shards are gathered.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    pub overlap: bool,
    /// Whether wholes stay from forward to backward.
    pub kept: bool,
}

pub const FORMS: [Form; 4] = [
    Form { overlap: true, kept: false },
    Form { overlap: false, kept: false },
    Form { overlap: true, kept: true },
    Form { overlap: false, kept: true },
];

/// The uses of a model: every unit in turn, then the first one again (a tied head). Backward of the
/// first use reads no weights (an embedding).
pub fn gathering(
    comm: &Comm,
    dev: &dyn Device,
    form: Form,
) -> Result<(Arena, Vec<Gather>, Gathering)> {
    let world = comm.world();
    let (arena, (uses, spares)) = shared(comm, dev, |arena| {
        let home = |unit: usize| {
            let parts = parts(unit, world);
            let len = (0..world).map(|rank| parts.len_of(rank)).max().expect("a rank");
            let weights = arena.take(Purpose::Weights, Dtype::F32, len);
            let gradients = arena.take(Purpose::Gradients, Dtype::F32, len);
            let whole = form.kept.then(|| arena.take(Purpose::Travel, Dtype::F32, parts.len()));
            let kept = whole.map(|whole| (unit, whole));
            let (unit, backward_reads_weights) = (number(unit), true);
            Gather { unit, parts, weights, gradients, kept, backward_reads_weights }
        };
        let mut uses: Vec<Gather> = (0..UNITS.len()).map(home).collect();
        uses.push(uses[0].clone());
        uses[0].backward_reads_weights = false;
        let spares = Spares::take(arena, comm, form.overlap, &uses);
        (uses, spares)
    })?;
    let gathering = Gathering::new(comm.clone(), form.overlap, spares, uses.clone());
    Ok((arena, uses, gathering))
}

/// Weights of a unit after `step` updates: every rank writes its shard of them.
pub fn write_weights(comm: &Comm, dev: &dyn Device, uses: &[Gather], step: usize) {
    for (unit, gather) in uses[..UNITS.len()].iter().enumerate() {
        let own = part_of(&gather.parts, comm.rank(), &weights_of(unit, step, comm.world()));
        dev.write_f32(&own, gather.weights.first(own.len()));
    }
}

pub fn weights_of(unit: usize, step: usize, world: usize) -> Vec<f32> {
    noise_f32(100 * step + unit, parts(unit, world).len())
}

/// One pass: the weights of every use that reads them, in the order of the pass. With a spare more
/// than is computed on, those of the use before are still there.
pub fn check_pass(
    dev: &dyn Device,
    (gathering, uses, form): (&Gathering, &[Gather], Form),
    pass: Pass,
    step: usize,
    mut then: impl FnMut(usize) -> Result<()>,
) -> Result<()> {
    let world = gathering.comm().world();
    let mut before: Option<(Region, Vec<f32>)> = None;
    for at in 0..uses.len() {
        let number = if pass == Pass::Forward { at } else { uses.len() - 1 - at };
        if pass == Pass::Forward || uses[number].backward_reads_weights {
            let whole = gathering.weights(dev, pass, number)?;
            let want = weights_of(uses[number].unit as usize, step, world);
            let what = format!("{world} ranks, {pass:?}, use {number}, step {step}");
            assert_eq!(read_f32(dev, whole.first(want.len())), want, "{what}");
            if let Some((region, values)) = before.filter(|_| form.overlap || form.kept) {
                assert_eq!(read_f32(dev, region), values, "{what}: the one before is still there");
            }
            before = Some((whole.first(want.len()), want));
        }
        then(number)?;
    }
    Ok(())
}
