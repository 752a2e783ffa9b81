//! All memory of a rank, decided before the first step.

use std::sync::Arc;

use crate::memory::ALIGN;
use crate::{Device, Dtype, Memory, OutOfMemory, Purpose, Region};

/// How many bytes a rank needs, by purpose. What the counting pass yields and the live pass obeys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    by_purpose: [usize; Purpose::ALL.len()],
}

impl MemoryPlan {
    /// Bytes for one purpose.
    #[must_use]
    pub fn bytes(&self, purpose: Purpose) -> usize {
        self.by_purpose[purpose as usize]
    }

    /// Bytes in all: the size of the arena.
    #[must_use]
    pub fn total(&self) -> usize {
        self.by_purpose.iter().sum()
    }
}

/// Hands out the regions of one [`Memory`].
///
/// Two kinds of regions: those that [`take`](Arena::take) returns stay for the arena's life; those
/// that [`scratch`](Arena::scratch) returns are given back at the end of the
/// [`scope`](Arena::scope) they were taken in, and the next scope takes the same bytes. A layer's
/// constructor opens a scope for what it needs only while it runs, and builds its parts within that
/// scope, so parts that never run at the same time share, and a part never shares with the whole it
/// belongs to.
#[derive(Debug)]
pub struct Arena {
    /// `None` while counting.
    memory: Option<Arc<Memory>>,
    /// Bytes handed out for good, by purpose.
    plan: MemoryPlan,
    /// Where scratch begins: behind everything that stays. Known in the live pass only.
    scratch_base: usize,
    scratch_top: usize,
}

impl Arena {
    /// An arena that only counts. Its regions have sizes but no bytes; a device refuses them.
    #[must_use]
    pub fn counting() -> Arena {
        Arena { memory: None, plan: MemoryPlan::default(), scratch_base: 0, scratch_top: 0 }
    }

    /// An arena of exactly the planned bytes, allocated on `device` and attached to it.
    ///
    /// # Errors
    /// If the device does not have them.
    pub fn live(device: &dyn Device, plan: &MemoryPlan) -> Result<Arena, OutOfMemory> {
        let memory = device.allocate(plan.total())?;
        device.attach(&memory);
        Ok(Arena {
            memory: Some(memory),
            plan: MemoryPlan::default(),
            scratch_base: plan.total() - plan.bytes(Purpose::Scratch),
            scratch_top: 0,
        })
    }

    /// The memory behind a live arena.
    #[must_use]
    pub const fn memory(&self) -> Option<&Arc<Memory>> {
        self.memory.as_ref()
    }

    /// A region of `len` elements that stays. It starts zeroed.
    ///
    /// # Panics
    /// If the purpose is [`Purpose::Scratch`] (see [`scratch`](Arena::scratch)), or if a live arena
    /// is asked for more than was counted.
    pub fn take(&mut self, purpose: Purpose, dtype: Dtype, len: usize) -> Region {
        assert!(purpose != Purpose::Scratch, "scratch is taken within a scope");
        let offset = self.plan.total() - self.plan.bytes(Purpose::Scratch);
        let bytes = padded(dtype, len);
        self.plan.by_purpose[purpose as usize] += bytes;
        if self.memory.is_some() {
            assert!(
                offset + bytes <= self.scratch_base,
                "the live pass asks for more than was counted"
            );
        }
        Region::new(self.id(), offset, len, dtype)
    }

    /// A region of `len` elements for the rest of the current scope. Its contents are whatever the
    /// last user left.
    ///
    /// # Panics
    /// If a live arena is asked for more than was counted.
    pub fn scratch(&mut self, dtype: Dtype, len: usize) -> Region {
        let offset = self.scratch_top;
        self.scratch_top += padded(dtype, len);
        let peak = &mut self.plan.by_purpose[Purpose::Scratch as usize];
        *peak = (*peak).max(self.scratch_top);
        if let Some(memory) = &self.memory {
            assert!(
                self.scratch_base + self.scratch_top <= memory.bytes(),
                "the live pass asks for more scratch than was counted"
            );
        }
        Region::new(self.id(), self.scratch_base + offset, len, dtype)
    }

    /// Runs `f`, then gives back the scratch that was taken within.
    pub fn scope<R>(&mut self, f: impl FnOnce(&mut Arena) -> R) -> R {
        let scope = self.open_scope();
        let result = f(self);
        self.close_scope(scope);
        result
    }

    /// Opens a scope where a closure would be in the way, as in a builder that owns its arena.
    #[must_use = "the scope must be closed"]
    pub const fn open_scope(&mut self) -> Scope {
        Scope { top: self.scratch_top }
    }

    /// Gives back the scratch that was taken since the scope was opened.
    ///
    /// # Panics
    /// If scopes are not closed in the reverse order of opening.
    pub const fn close_scope(&mut self, scope: Scope) {
        assert!(scope.top <= self.scratch_top, "scopes close in the reverse order of opening");
        self.scratch_top = scope.top;
    }

    /// What has been asked for so far; at the end of a constructor, the plan.
    #[must_use]
    pub const fn plan(&self) -> MemoryPlan {
        self.plan
    }

    fn id(&self) -> u32 {
        self.memory.as_ref().map_or(u32::MAX, |m| m.id())
    }
}

/// An open scope of an [`Arena`]; see [`Arena::open_scope`].
#[derive(Debug)]
pub struct Scope {
    top: usize,
}

/// Bytes of a region, rounded up so that the next one is aligned.
fn padded(dtype: Dtype, len: usize) -> usize {
    (len * dtype.bytes()).next_multiple_of(ALIGN)
}
