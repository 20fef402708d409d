//! The test data, which lies outside the project.

use std::fs::File;
use std::path::PathBuf;

/// The folder that `KVSPAN_TEST_DATA` names; without it, `None`, and the reason on the error output.
pub(crate) fn test_data(name: &str) -> Option<File> {
    let Some(folder) = std::env::var_os("KVSPAN_TEST_DATA").map(PathBuf::from) else {
        eprintln!("skipped: KVSPAN_TEST_DATA does not name the folder with {name}");
        return None;
    };
    let opened = File::open(folder.join(name));
    opened.inspect_err(|error| eprintln!("skipped: {name} in KVSPAN_TEST_DATA: {error}")).ok()
}
