//! Time, real or simulated, and who spent it.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::KernelKind;

/// The time of one rank. Its device and its communicator read the same clock, so that what they
/// record can be laid side by side, and so that a simulated device can make time pass.
///
/// Clones are the same clock.
#[derive(Clone, Debug)]
pub struct Clock(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Wall(Instant),
    /// Nanoseconds. Only one rank's thread moves it, so relaxed accesses do.
    Simulated(Arc<AtomicU64>),
}

impl Clock {
    /// The real time since `origin`.
    #[must_use]
    pub const fn wall(origin: Instant) -> Clock {
        Clock(Kind::Wall(origin))
    }

    /// A time that stands still unless somebody moves it, from 0.
    #[must_use]
    pub fn simulated() -> Clock {
        Clock(Kind::Simulated(Arc::default()))
    }

    /// Whether time is simulated.
    #[must_use]
    pub const fn is_simulated(&self) -> bool {
        matches!(self.0, Kind::Simulated(_))
    }

    /// Time since the origin.
    #[must_use]
    pub fn now(&self) -> Duration {
        match &self.0 {
            Kind::Wall(origin) => origin.elapsed(),
            Kind::Simulated(nanos) => Duration::from_nanos(nanos.load(Ordering::Relaxed)),
        }
    }

    /// Lets time pass until `then`; returns at once if that is past. Real time takes a sleep.
    ///
    /// # Panics
    /// If simulated time gets past five centuries.
    pub fn wait_until(&self, then: Duration) {
        match &self.0 {
            Kind::Wall(origin) => thread::sleep(then.saturating_sub(origin.elapsed())),
            Kind::Simulated(nanos) => {
                let then = u64::try_from(then.as_nanos()).expect("less than five centuries");
                nanos.fetch_max(then, Ordering::Relaxed);
            }
        }
    }
}

/// One call of a kernel, by a rank's [`Clock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelSpan {
    /// What ran.
    pub kind: KernelKind,
    /// When it began.
    pub begin: Duration,
    /// When it had ended.
    pub end: Duration,
}

/// Keeps the spans of a device, once it is asked to.
#[derive(Debug, Default)]
pub(crate) struct Recorder(RefCell<Option<(Clock, Vec<KernelSpan>)>>);

impl Recorder {
    pub fn start(&self, clock: &Clock) {
        *self.0.borrow_mut() = Some((clock.clone(), Vec::new()));
    }

    pub fn take(&self) -> Vec<KernelSpan> {
        self.0.borrow_mut().as_mut().map(|(_, spans)| std::mem::take(spans)).unwrap_or_default()
    }

    /// A kernel has just ended that took `spent`.
    pub fn ended(&self, kind: KernelKind, spent: Duration) {
        if let Some((clock, spans)) = &mut *self.0.borrow_mut() {
            let end = clock.now();
            spans.push(KernelSpan { kind, begin: end.saturating_sub(spent), end });
        }
    }
}
