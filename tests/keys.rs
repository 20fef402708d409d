//! The keys of blocks. The digests here were made by another implementation of SHA-256, Python's
//! `hashlib`, from the definition in the documentation; they never change.
//!
//! ```python
//! def u32(n): return n.to_bytes(4, "little")
//! def field(b): return u32(len(b)) + b
//! def opt(b): return b"\0" if b is None else b"\1" + field(b)
//! def root(namespace, cache_salt, lora_id, epoch):
//!     fields = opt(namespace) + opt(cache_salt) + opt(lora_id) + epoch.to_bytes(8, "little")
//!     return hashlib.sha256(b"kvspan.root.v1" + fields).digest()
//! def block(parent, block_size, tokens, extra_keys=()):
//!     extra = u32(len(extra_keys)) + b"".join(map(field, extra_keys))
//!     tokens = u32(block_size) + b"".join(map(u32, tokens))
//!     return hashlib.sha256(b"kvspan.block.v1" + parent + tokens + extra).digest()
//! ```

use kvspan::{BlockKey, KeyChain, KeyRoot, KvError, Result};
use proptest::collection::vec;
use proptest::prelude::*;

const NONE: KeyRoot<'_> = KeyRoot { namespace: None, cache_salt: None, lora_id: None, epoch: 0 };
const ALL: KeyRoot<'_> = KeyRoot {
    namespace: Some(b"llama"),
    cache_salt: Some(b"tenant-7"),
    lora_id: Some(b"adapter"),
    epoch: 3,
};

fn chain(root: KeyRoot<'_>, block_size: usize) -> Result<KeyChain> {
    KeyChain::new(root.key()?, block_size)
}

fn hex(keys: &[BlockKey]) -> Vec<String> {
    keys.iter().map(BlockKey::to_string).collect()
}

#[test]
fn roots_are_the_golden_ones() {
    let salted_with_nothing = KeyRoot { cache_salt: Some(b""), ..NONE };
    let roots = [NONE, ALL, salted_with_nothing].map(|root| root.key().unwrap());
    assert_eq!(
        hex(&roots),
        [
            "e48d02c4087a4993b4926b7e33bd5832c2a9b1113af160512dca42afd4ecdb5a",
            "a7be654b2b23f5637121b53e06e3d59679f199ca38d9f5539bf5d26e97c1c17c",
            "2942a934e56ee3ca2aec79fb11aefaa2ae6b9e28b6c3b37b9913c74bc2d74b3a",
        ]
    );
    assert_eq!(NONE, KeyRoot::default());
}

#[test]
fn keys_of_blocks_of_16_tokens_are_the_golden_ones() {
    let mut chain = chain(NONE, 16).unwrap();
    chain.extend(&(0..33).collect::<Vec<_>>());
    assert_eq!(
        hex(chain.block_keys()),
        [
            "90455353fdce42d1dd74202b4328958c0d008f6ab1a1b820149409179f3fc503",
            "e3e37746803d08980a8d56ee1ad27f9086baafc8c5291a999ab3167ff7fd3f4e",
        ]
    );
}

#[test]
fn keys_of_a_block_with_extra_keys_and_of_those_around_it_are_the_golden_ones() {
    let mut chain = chain(ALL, 4).unwrap();
    chain.set_extra_keys(1, &[&b"image:1"[..], b""]).unwrap();
    chain.extend(&[0, 1, u32::MAX, 7, 5, 6, 7, 8, 9, 10, 11, 12]);
    assert_eq!(
        hex(chain.block_keys()),
        [
            "93768021ec758cf6c4271820fed6ef49c438f33afd07ca593e18f0aad110e499",
            "3453ddcef186f4f3bc30f7c23297232e9de145260c8f2a256e4b90f05dd6d61b",
            "c09e3157131a0d1b747a51d8960be0de7b977c6cc6dd4d8eadfc70d6d5e75623",
        ]
    );
}

/// With 16 tokens the padding just fits into the last 64 bytes, and with one more it does not.
#[test]
fn keys_of_blocks_of_any_size_are_the_golden_ones() {
    for (block_size, golden) in [
        (1, "12c84b0bfce03bc926fdd41467fb28d02d899ff3e2663812017e87aebf229101"),
        (2, "aa59cbe1b200e96c2df44395bb1ab41d92ad365a7abc759522de11a2738077bb"),
        (3, "90fa4b2d48d968da1c20ad6b0fca01b5d1fb37cd18a3897720d2a008da8150fc"),
        (15, "696aeada673cf9b46a7eb4e1ebe5e548fecced65eee3c5737ddf9f6a6efec2af"),
        (17, "3bfe7456c9dea021421cbcfe94b70e553dd33b182cd809b2dc4fb0e5b4aa4084"),
        (512, "29463736e8e5cf4acc3a609a0a7b2bcd955a738fb6834aa8f8147e48e6d7e666"),
    ] {
        let mut chain = chain(NONE, block_size).unwrap();
        chain.extend(&(0..512).collect::<Vec<_>>()[..block_size]);
        assert_eq!(hex(chain.block_keys()), [golden], "of {block_size} tokens");
    }
}

#[test]
fn every_field_of_the_root_counts_and_fields_do_not_run_into_each_other() {
    let roots = [
        NONE,
        ALL,
        KeyRoot { namespace: Some(b"a"), ..NONE },
        KeyRoot { cache_salt: Some(b"a"), ..NONE },
        KeyRoot { lora_id: Some(b"a"), ..NONE },
        KeyRoot { epoch: 1, ..NONE },
        KeyRoot { namespace: Some(b"ab"), cache_salt: Some(b"c"), ..NONE },
        KeyRoot { namespace: Some(b"a"), cache_salt: Some(b"bc"), ..NONE },
    ];
    let mut keys = roots.map(|root| root.key().unwrap()).to_vec();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), roots.len());
}

#[test]
fn a_look_up_leaves_at_least_one_token_to_compute() {
    let mut chain = chain(NONE, 4).unwrap();
    let reusable = |chain: &mut KeyChain, tokens: &[u32]| {
        chain.extend(tokens);
        chain.reusable_keys().len()
    };
    assert_eq!(reusable(&mut chain, &[]), 0);
    assert_eq!(reusable(&mut chain, &[1, 2, 3, 4]), 0);
    assert_eq!(reusable(&mut chain, &[5]), 1);
    assert_eq!(reusable(&mut chain, &[6, 7, 8]), 1);
    assert_eq!(reusable(&mut chain, &[9]), 2);
}

#[test]
fn extra_keys_can_be_changed_until_their_block_is_full() {
    let mut chain = chain(NONE, 2).unwrap();
    let mut plain = chain.clone();
    chain.set_extra_keys(0, &["cat"]).unwrap();
    chain.set_extra_keys(0, &[""; 0]).unwrap();
    chain.extend(&[1, 2]);
    plain.extend(&[1, 2]);
    assert_eq!(chain, plain);
    let late = chain.set_extra_keys(0, &["dog"]);
    assert_eq!(late, Err(KvError::AlreadyKeyed { block_index: 0 }));
}

#[test]
fn extra_keys_go_with_the_last_token_of_their_block() {
    let mut chain = chain(NONE, 2).unwrap();
    let empty = chain.clone();
    chain.set_extra_keys(0, &["cat"]).unwrap();
    chain.extend(&[1]);
    chain.truncate(0).unwrap();
    assert_eq!(chain, empty);

    chain.set_extra_keys(0, &["cat"]).unwrap();
    chain.extend(&[1, 2]);
    let keys = chain.block_keys().to_vec();
    chain.truncate(1).unwrap();
    chain.extend(&[2]);
    assert_eq!(chain.block_keys(), keys);

    // Those of a block that has no token yet stay.
    chain.set_extra_keys(2, &["dog"]).unwrap();
    let before = chain.clone();
    chain.truncate(2).unwrap();
    chain.extend(&[3]);
    chain.truncate(2).unwrap();
    assert_eq!(chain, before);
}

#[test]
fn a_chain_can_not_be_truncated_to_more_than_it_has() {
    let mut chain = chain(NONE, 2).unwrap();
    chain.extend(&[1, 2, 3]);
    let refused = chain.truncate(4);
    assert_eq!(refused, Err(KvError::RangeOutOfBounds { start: 0, end: 4, len: 3 }));
    assert_eq!(chain.tokens(), [1, 2, 3]);
}

#[test]
fn a_block_has_at_least_one_token() {
    let refused = chain(NONE, 0).map(|_| ());
    assert_eq!(refused, Err(KvError::InvalidConfig { field: "block_size" }));
}

#[cfg(target_pointer_width = "64")]
#[test]
fn a_block_has_no_more_tokens_than_its_key_can_say() {
    let refused = chain(NONE, 1 << 32).map(|_| ());
    let (what, given, max) = ("block_size", 1 << 32, (1 << 32) - 1);
    assert_eq!(refused, Err(KvError::TooLarge { what, given, max }));
}

#[test]
fn debug_output_gives_no_token_away() {
    let mut chain = chain(NONE, 2).unwrap();
    chain.extend(&[123_456, 7, 7]);
    let text = format!("{chain:?}");
    assert!(!text.contains("123456"), "{text}");
    assert!(text.contains("num_tokens: 3"), "{text}");
}

#[derive(Clone, Debug)]
enum Change {
    Extend(Vec<u32>),
    Truncate(usize),
    SetExtraKeys(usize, Vec<Vec<u8>>),
}

fn any_change() -> impl Strategy<Value = Change> {
    prop_oneof![
        4 => vec(0_u32..2, 0..9).prop_map(Change::Extend),
        1 => (0_usize..12).prop_map(Change::Truncate),
        1 => (0_usize..6, vec(vec(any::<u8>(), 0..3), 0..3))
            .prop_map(|(block, keys)| Change::SetExtraKeys(block, keys)),
    ]
}

proptest! {
    #[test]
    fn a_chain_is_the_same_however_it_came_to_its_tokens(
        block_size in 1_usize..5,
        changes in vec(any_change(), 0..12),
    ) {
        let mut grown = chain(ALL, block_size).unwrap();
        let mut tokens = Vec::new();
        let mut extra_keys = Vec::new();
        for change in changes {
            match change {
                Change::Extend(more) => {
                    grown.extend(&more);
                    tokens.extend(more);
                }
                Change::Truncate(new_len) if new_len <= tokens.len() => {
                    grown.truncate(new_len).unwrap();
                    let emptied = new_len.div_ceil(block_size)..tokens.len().div_ceil(block_size);
                    tokens.truncate(new_len);
                    extra_keys.retain(|(block, _)| !emptied.contains(block));
                }
                Change::SetExtraKeys(block, keys) if block >= tokens.len() / block_size => {
                    grown.set_extra_keys(block, &keys).unwrap();
                    extra_keys.push((block, keys));
                }
                Change::Truncate(_) | Change::SetExtraKeys(..) => {}
            }
            let mut at_once = chain(ALL, block_size).unwrap();
            for (block, keys) in &extra_keys {
                at_once.set_extra_keys(*block, keys).unwrap();
            }
            at_once.extend(&tokens);
            prop_assert_eq!(&grown, &at_once);
        }
    }
}
