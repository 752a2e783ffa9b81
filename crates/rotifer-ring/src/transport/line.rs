//! A simulated link, as one rank sees it.

use std::time::Duration;

use crate::launch::Link;
use crate::schedule::Pass;

/// The simulated link to one rank.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// Per pass, until when it carries what was sent before. Collectives share the direction of
    /// forward hops.
    busy: [Duration; 2],
    pub hidden: Duration,
    pub exposed: Duration,
}

impl Line {
    /// Until when messages of this pass keep the link busy.
    pub const fn busy(&self, pass: Pass) -> Duration {
        self.busy[pass as usize]
    }

    /// Lets a message of `bytes` that was sent at `sent` go over the link, in `rounds` messages
    /// that wait for each other. Returns when it has arrived.
    pub fn carry(
        &mut self,
        link: Link,
        pass: Pass,
        (rounds, bytes): (u32, usize),
        sent: Duration,
        now: Duration,
    ) -> Duration {
        let busy = &mut self.busy[pass as usize];
        let begin = sent.max(*busy);
        let end = begin + Duration::from_secs_f64(bytes as f64 / link.bytes_per_sec);
        *busy = end;
        let arrival = end + link.latency * rounds;
        let exposed = arrival.saturating_sub(now).min(arrival - begin);
        self.exposed += exposed;
        self.hidden += arrival - begin - exposed;
        arrival
    }
}
