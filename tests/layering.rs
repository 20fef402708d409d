//! Who may know whom: imports point to lower layers, Python stays in its folder, and `unsafe` in
//! the memory module and the buffer protocol.

use std::fs;
use std::path::{Path, PathBuf};

/// The top-level modules and their layers. A module imports from lower layers only.
const LAYERS: [(&str, u8); 15] = [
    ("error", 0),
    ("ids", 0),
    ("dtype", 0),
    ("sync", 0),
    ("config", 1),
    ("hash", 1),
    ("memory", 2),
    ("block", 2),
    ("layer", 3),
    ("prefix", 3),
    ("store", 4),
    ("handle", 5),
    ("manager", 6),
    ("attention", 6),
    ("python", 7),
];

fn layer(module: &str) -> Option<u8> {
    LAYERS.iter().find(|(name, _)| *name == module).map(|&(_, layer)| layer)
}

fn sources(path: PathBuf) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(&path) else { return vec![path] };
    entries.flat_map(|entry| sources(entry.expect("the folder can be read").path())).collect()
}

/// Line and first name of each path that begins with `root`, and of each path in a group of them.
fn names(code: &str, root: &str) -> Vec<(usize, String)> {
    let word = |path: &str| {
        path.trim_start()
            .split(|c: char| !c.is_alphanumeric() && c != '_')
            .next()
            .map(str::to_owned)
    };
    let mut names = Vec::new();
    for (at, _) in code.match_indices(root) {
        let (line, path) = (code[..at].matches('\n').count() + 1, &code[at + root.len()..]);
        names.push((line, word(path.trim_start_matches('{'))));
        let mut depth = 0;
        for (at, c) in path.char_indices().take_while(|_| path.starts_with('{')) {
            depth += i32::from(c == '{') - i32::from(c == '}');
            match (c, depth) {
                (_, 0) => break,
                (',', 1) => names.push((line, word(&path[at + 1..]))),
                _ => {}
            }
        }
    }
    names
        .into_iter()
        .filter_map(|(line, name)| Some((line, name.filter(|n| !n.is_empty())?)))
        .collect()
}

fn faults(src: &Path) -> Vec<String> {
    let mut faults = Vec::new();
    for file in sources(src.to_owned()) {
        let inside = file.strip_prefix(src).expect("it was found there").with_extension("");
        let place: Vec<_> = inside.iter().filter_map(|name| name.to_str()).collect();
        let (own, depth) = (place[0], place.iter().filter(|name| **name != "mod").count());
        let mut fault = |line: usize, what: &str| {
            faults.push(format!("{}:{line}: {what}", file.display()));
        };
        if own != "lib" && layer(own).is_none() {
            fault(1, "this top-level module has no layer");
        }
        let text = fs::read_to_string(&file).expect("sources are text");
        let lines: Vec<_> =
            text.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
        let code = lines.join("\n");
        for (line, name) in names(&code, "crate::") {
            if name != own && layer(&name).is_none_or(|upper| Some(upper) >= layer(own)) {
                fault(line, &format!("`{name}` is not in a lower layer"));
            }
        }
        for (line, name) in names(&code, &"super::".repeat(depth)) {
            // A module inside the file, and so one level deeper, may mean a sibling of that name.
            if layer(&name).is_some() && !src.join(own).join(&name).with_extension("rs").exists() {
                fault(line, &format!("`{name}` is reached by climbing out of the module"));
            }
        }
        for (line, code) in (1..).zip(lines) {
            if own != "python" && ["pyo3", "numpy"].iter().any(|name| code.contains(name)) {
                fault(line, "only the Python module knows Python");
            }
            let home = own == "memory" || place.starts_with(&["python", "buffer"]);
            if !home
                && ["{", "fn", "impl"].iter().any(|end| code.contains(&format!("unsafe {end}")))
            {
                fault(line, "unsafe code has its own modules");
            }
        }
    }
    faults
}

#[test]
fn imports_point_down_and_unsafe_and_python_stay_at_home() {
    let faults = faults(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}
