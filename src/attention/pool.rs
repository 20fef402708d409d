//! Who computes, and with which instructions.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use fearless_simd::Level;
use parking_lot::Mutex;

use crate::error::{KvError, Result};

/// Nothing that runs today makes use of more, and some systems would start a hundred thousand.
const MAX_THREADS: usize = 4096;

/// The threads that compute attention, and the instructions they use.
///
/// The thread that makes a call computes as well, so that a pool of one thread has none of its own.
/// A pool can be shared. Its threads work for one call at a time: a call that finds them at work
/// computes on its own thread alone, and so waits for no other call. What is computed is the same to the
/// bit for any number of threads.
///
/// # Examples
///
/// ```
/// use kvspan::AttentionPool;
///
/// let pool = AttentionPool::new(2)?;
/// assert_eq!(pool.num_threads(), 2);
/// # Ok::<(), kvspan::KvError>(())
/// ```
pub struct AttentionPool {
    threads: Option<rayon::ThreadPool>,
    /// Held by the call that the threads work for.
    turn: Mutex<()>,
    num_threads: usize,
    level: Level,
}

/// Sets of vector instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Instructions {
    /// What every processor has that this was compiled for: SSE2 on x86-64, NEON on 64-bit Arm.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 as of Ice Lake and Zen 4.
    Avx512,
}

impl AttentionPool {
    /// Makes a pool that uses the best instructions of this processor.
    ///
    /// # Errors
    ///
    /// [`KvError::InvalidConfig`] for no threads; [`KvError::NoThreads`] if the system does not give
    /// them, or for more than 4096.
    pub fn new(num_threads: usize) -> Result<Self> {
        Self::with_level(num_threads, Level::new())
    }

    /// Makes a pool that uses no other instructions than these; `None` if the processor does not have
    /// them.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new).
    pub fn with_instructions(
        num_threads: usize,
        instructions: Instructions,
    ) -> Result<Option<Self>> {
        instructions.level().map(|level| Self::with_level(num_threads, level)).transpose()
    }

    fn with_level(num_threads: usize, level: Level) -> Result<Self> {
        if num_threads == 0 {
            return Err(KvError::InvalidConfig { field: "num_threads" });
        }
        if num_threads > MAX_THREADS {
            return Err(KvError::NoThreads { num_threads });
        }
        let builder = rayon::ThreadPoolBuilder::new()
            .num_threads(num_threads - 1)
            .thread_name(|index| format!("kvspan-attention-{index}"));
        let threads = (num_threads > 1).then(|| builder.build()).transpose();
        let threads = threads.map_err(|_| KvError::NoThreads { num_threads })?;
        Ok(Self { threads, turn: Mutex::new(()), num_threads, level })
    }

    /// Returns how many threads compute, the one that calls among them.
    pub fn num_threads(&self) -> usize {
        self.num_threads
    }

    /// Returns the instructions that are used.
    pub fn instructions(&self) -> Instructions {
        match self.level {
            #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
            Level::Avx512(_) => Instructions::Avx512,
            #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
            Level::Avx2(_) => Instructions::Avx2,
            _ => Instructions::Portable,
        }
    }

    pub(super) fn level(&self) -> Level {
        self.level
    }

    /// Calls `compute` with each of `0..count`, lower ones first. An error of it ends the call.
    ///
    /// `pause` is called after each that is computed on the thread that makes the call; an error of it
    /// ends the call too.
    pub(super) fn run<E: From<KvError>>(
        &self,
        count: usize,
        compute: impl Fn(usize) -> Result<()> + Sync,
        mut pause: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let (next, failed) = (AtomicUsize::new(0), OnceLock::new());
        let compute_one = || {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return false;
            }
            if let Err(error) = compute(index) {
                next.store(count, Ordering::Relaxed);
                // Of two errors either will do.
                let _ = failed.set(error);
            }
            true
        };
        let mut compute_all = || {
            while compute_one() {
                if let Err(error) = pause() {
                    next.store(count, Ordering::Relaxed);
                    return Err(error);
                }
            }
            Ok(())
        };
        // Not for one of them, which has no use for the threads.
        let turn = if count > 1 { self.turn.try_lock() } else { None };
        match (&self.threads, turn) {
            (Some(threads), Some(_turn)) => threads.in_place_scope(|scope| {
                for _ in 1..self.num_threads.min(count) {
                    scope.spawn(|_| while compute_one() {});
                }
                compute_all()
            }),
            _ => compute_all(),
        }?;
        failed.into_inner().map_or(Ok(()), |error| Err(error.into()))
    }
}

/// One thread: the one that calls.
impl Default for AttentionPool {
    fn default() -> Self {
        Self { threads: None, turn: Mutex::new(()), num_threads: 1, level: Level::new() }
    }
}

impl fmt::Debug for AttentionPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttentionPool")
            .field("num_threads", &self.num_threads)
            .field("instructions", &self.instructions())
            .finish_non_exhaustive()
    }
}

impl Instructions {
    /// Returns the instructions that this processor has, the best ones first.
    pub fn available() -> impl Iterator<Item = Self> {
        [Self::Avx512, Self::Avx2, Self::Portable].into_iter().filter(|set| set.level().is_some())
    }

    fn level(self) -> Option<Level> {
        match self {
            Self::Portable => Some(Level::baseline()),
            #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
            Self::Avx2 => Level::new().as_avx2().map(Level::Avx2),
            #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
            Self::Avx512 => Level::new().as_avx512().map(Level::Avx512),
            #[cfg(not(any(target_arch = "x86", target_arch = "x86_64")))]
            Self::Avx2 | Self::Avx512 => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, mpsc};
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// After which something will never happen.
    const LONG: Duration = Duration::from_mins(1);

    #[test]
    fn a_call_that_finds_the_threads_at_work_waits_for_no_other() {
        let pool = AttentionPool::new(2).unwrap();
        let (begun, end) = (Barrier::new(3), Barrier::new(3));
        let (sender, done) = mpsc::channel();
        thread::scope(|scope| {
            let long = scope.spawn(|| {
                let wait = |_| {
                    begun.wait();
                    end.wait();
                    Ok(())
                };
                pool.run::<KvError>(2, wait, || Ok(()))
            });
            begun.wait();
            let short = scope.spawn(|| {
                let here = thread::current().id();
                let alone = |_| {
                    assert_eq!(thread::current().id(), here);
                    Ok(())
                };
                let mut pauses = 0;
                let pause = || {
                    pauses += 1;
                    Ok::<_, KvError>(())
                };
                assert_eq!(pool.run(5, alone, pause), Ok(()));
                assert_eq!(pauses, 5);
                // Nobody may listen any more.
                let _ = sender.send(());
            });
            let was_done = done.recv_timeout(LONG);
            end.wait();
            assert_eq!(was_done, Ok(()), "it waited for the long call");
            short.join().unwrap();
            assert_eq!(long.join().unwrap(), Ok(()));
        });
    }

    #[test]
    fn a_call_for_one_leaves_the_threads_to_others() {
        let pool = AttentionPool::new(2).unwrap();
        let one = |_| {
            let (sender, other) = mpsc::channel();
            let other = Mutex::new(other);
            // The first waits for the second, and so they are on two threads.
            let meet = |index| {
                if index == 0 {
                    return other.lock().recv_timeout(LONG).map_err(|_| KvError::NothingToAttend);
                }
                sender.send(()).map_err(|_| KvError::NothingToAttend)
            };
            pool.run(2, meet, || Ok(()))
        };
        assert_eq!(pool.run::<KvError>(1, one, || Ok(())), Ok(()));
    }

    #[test]
    fn an_error_ends_the_call() {
        for num_threads in [1, 2] {
            let pool = AttentionPool::new(num_threads).unwrap();
            let called = AtomicUsize::new(0);
            let fail = |index| {
                called.fetch_add(1, Ordering::Relaxed);
                if index == 0 { Err(KvError::NothingToAttend) } else { Ok(()) }
            };
            let result: Result<()> = pool.run(100, fail, || Ok(()));
            assert_eq!(result, Err(KvError::NothingToAttend));
            assert!(num_threads > 1 || called.into_inner() == 1);
        }
    }

    #[test]
    fn memory_that_can_not_be_had_is_an_error() {
        let len = usize::MAX / 8;
        let bytes = len * size_of::<f32>();
        assert_eq!(super::super::zeros(len), Err(KvError::OutOfMemory { bytes }));
    }
}
