//! Knowing that another thread waits inside a call, without waiting for some time to pass.

use std::fs;
use std::path::PathBuf;
use std::thread;

/// A thread, in the eyes of the system.
#[derive(Debug)]
pub(crate) struct Sleeper(Option<PathBuf>);

impl Sleeper {
    /// The calling thread. It hands the result over just before the call that is to block.
    pub(crate) fn current() -> Self {
        let place = fs::read_link("/proc/thread-self").ok();
        Self(place.map(|place| PathBuf::from("/proc").join(place).join("stat")))
    }

    /// Returns when the thread sleeps. Where the system does not tell, returns after a good while.
    pub(crate) fn wait_until_asleep(&self) {
        let Some(stat) = &self.0 else {
            return (0..100_000).for_each(|_| thread::yield_now());
        };
        // The state follows the name, which is in brackets; a thread that is gone has none.
        let is_awake = |stat: &str| stat.rsplit(") ").next().is_some_and(|s| !s.starts_with('S'));
        while fs::read_to_string(stat).is_ok_and(|stat| is_awake(&stat)) {
            thread::yield_now();
        }
    }
}
