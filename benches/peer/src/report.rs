//! One line of JSON a row on stdout, and the same for people on stderr.

use crate::timing::quantile;

/// What a row's ratio has to reach.
#[derive(Clone, Copy)]
pub enum Target {
    AtMost(f64),
    AtLeast(f64),
    None,
}

/// Prints the head of the table for people.
pub fn header(title: &str) {
    eprintln!("\n{title}\n{:48} {:>12} {:>12} {:>7} {:>7}", "", "ours", "peer", "ratio", "minima");
}

/// Prints a row in which both sides did the same work: `ratio` is ours to theirs, in time.
pub fn beside(row: &str, [ours, peer]: [Vec<f64>; 2], target: Target) {
    let minima = minimum(&ours) / minimum(&peer);
    let (ours, peer) = (median(ours), median(peer));
    print(row, ours, peer, ours / peer, minima, target);
}

/// Prints a row in which the peer is the same code on one thread: `ratio` is that of throughputs.
pub fn gain(row: &str, [one, two]: [Vec<f64>; 2], target: Target) {
    let minima = minimum(&one) / minimum(&two);
    let (one, two) = (median(one), median(two));
    print(row, two, one, one / two, minima, target);
}

fn print(row: &str, ours: f64, peer: f64, ratio: f64, minima: f64, target: Target) {
    let (goal, met) = match target {
        Target::AtMost(most) => (most.to_string(), ratio <= most),
        Target::AtLeast(least) => (least.to_string(), ratio >= least),
        Target::None => ("null".to_owned(), true),
    };
    println!(
        r#"{{"row": "{row}", "ours_ns": {ours:.2}, "peer_ns": {peer:.2}, "ratio": {ratio:.4}, "ratio_of_minima": {minima:.4}, "target": {goal}}}"#
    );
    let verdict = match target {
        Target::None => "",
        _ if met => "  met",
        _ => "  MISSED",
    };
    eprintln!("{row:48} {ours:>9.1} ns {peer:>9.1} ns {ratio:7.3} {minima:7.3}{verdict}");
}

fn median(samples: Vec<f64>) -> f64 {
    quantile(samples, 0.5)
}

fn minimum(samples: &[f64]) -> f64 {
    samples.iter().copied().fold(f64::INFINITY, f64::min)
}
