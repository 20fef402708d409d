//! Measures kvspan beside other crates: layer caches beside `ghostlink-core`, and the bookkeeping of
//! blocks beside `ferrum-kv`.
//!
//! ```text
//! cd benches/peer && cargo run --release > rows.jsonl     # both, in two minutes
//! cargo run --release -- --quick blocks                   # one, in a second, to see that it works
//! ```
//!
//! A row is a line of JSON on stdout: nanoseconds of both sides, `ratio` (ours to theirs),
//! and the `target` for it, where there is one. In the rows that begin with `gain_` the peer is the same
//! code on one thread, and the ratio is that of the throughputs. The table for people is on stderr.
//!
//! Both sides run in turn in one process and the order changes from round to round; a number is the
//! median of the rounds. `ratio_of_minima` is the same ratio between the fastest rounds: where the
//! two ratios differ much, the machine was not quiet. Data is not zero, rows are hot in the cache
//! unless the row's name says otherwise.

mod blocks;
mod cache;
mod layer;
mod report;
mod timing;

use timing::Pace;

fn main() {
    let arguments = std::env::args().skip(1).collect::<Vec<_>>();
    let quick = arguments.iter().any(|argument| argument == "--quick");
    let pace = if quick { Pace::QUICK } else { Pace::FULL };
    let subjects = arguments.iter().filter(|argument| !argument.starts_with('-'));
    let wanted =
        |subject: &str| subjects.clone().count() == 0 || subjects.clone().any(|s| s == subject);
    if wanted("layer") {
        layer::run(pace);
    }
    if wanted("blocks") {
        blocks::run(pace);
    }
}
