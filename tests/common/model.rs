//! What a cache is, in the plainest terms: a list of rows, a list of pins, and no threads.

use std::ops::Range;

use kvspan::{KVCacheConfig, KvError, Result};

/// Sizes that are no multiple of anything, so that the values do not begin where the keys end.
pub(crate) const CONFIG: KVCacheConfig =
    KVCacheConfig { max_tokens_per_seq: 7, num_heads: 1, hidden_dim_per_head: 3 };
pub(crate) const CAPACITY: usize = CONFIG.max_tokens_per_seq;
pub(crate) const WIDTH: usize = CONFIG.token_width();

/// Keys and values; of one token unless said otherwise.
pub(crate) type Row = (Vec<f32>, Vec<f32>);

#[derive(Debug, Default)]
pub(crate) struct Model {
    pub(crate) initialized: bool,
    pub(crate) rows: Vec<Row>,
    pub(crate) reserved: Option<Vec<Row>>,
    pub(crate) pins: Vec<Range<usize>>,
    /// Read closures that the calling thread is in.
    pub(crate) reading: usize,
}

impl Model {
    pub(crate) fn initialize(&mut self, seq_len: usize) -> Result<()> {
        if seq_len == 0 {
            return Err(KvError::EmptyInitialize);
        }
        self.grow(seq_len.min(CAPACITY))?;
        self.initialized = true;
        Ok(())
    }

    pub(crate) fn write_kv(&mut self, at: usize, row: &Row, timed: bool) -> Result<()> {
        check_entry(at, row)?;
        self.put(&[(at, row.clone())], timed)
    }

    pub(crate) fn write_kv_batch(&mut self, entries: &[(usize, Row)], timed: bool) -> Result<()> {
        for (index, (at, row)) in entries.iter().enumerate() {
            let in_batch = |error| KvError::BatchEntry { index, source: Box::new(error) };
            check_entry(*at, row).map_err(in_batch)?;
        }
        self.put(entries, timed)
    }

    pub(crate) fn append(&mut self, (keys, values): &Row) -> Result<Range<usize>> {
        check_lengths(keys, values)?;
        if keys.len() % WIDTH != 0 {
            return Err(KvError::WidthMismatch { given: keys.len(), width: WIDTH });
        }
        let range = self.room_for(keys.len() / WIDTH)?;
        if !range.is_empty() {
            self.check_unreserved()?;
        }
        self.initialized = true;
        let rows = keys.chunks(WIDTH).zip(values.chunks(WIDTH));
        self.rows.extend(rows.map(|(keys, values)| (keys.to_vec(), values.to_vec())));
        Ok(range)
    }

    pub(crate) fn truncate(&mut self, new_len: usize, timed: bool) -> Result<()> {
        let len = self.rows.len();
        if new_len > len {
            return Err(KvError::RangeOutOfBounds { start: new_len, end: new_len, len });
        }
        if new_len < len {
            self.check_changeable(new_len..len, timed)?;
            self.check_unreserved()?;
        }
        self.rows.truncate(new_len);
        Ok(())
    }

    pub(crate) fn reserve(&mut self, num_tokens: usize) -> Result<Range<usize>> {
        let range = self.room_for(num_tokens)?;
        self.check_unreserved()?;
        self.initialized = true;
        self.reserved = Some(vec![zeros(); num_tokens]);
        Ok(range)
    }

    pub(crate) fn commit(&mut self) -> Range<usize> {
        let start = self.rows.len();
        self.rows.extend(self.reserved.take().into_iter().flatten());
        start..self.rows.len()
    }

    pub(crate) fn pin(&mut self, start: usize, end: usize) -> Result<()> {
        self.read(start, end)?;
        self.pins.push(start..end);
        Ok(())
    }

    pub(crate) fn read(&self, start: usize, end: usize) -> Result<Row> {
        check_order(start, end)?;
        let len = self.rows.len();
        let rows = self.rows.get(start..end);
        rows.map(joined).ok_or(KvError::RangeOutOfBounds { start, end, len })
    }

    pub(crate) fn read_kv(&self, token: usize) -> Result<Row> {
        let len = self.rows.len();
        self.rows.get(token).cloned().ok_or(KvError::TokenOutOfRange { token, len })
    }

    pub(crate) fn read_range_into(&self, start: usize, end: usize, out: &mut Row) -> Result<()> {
        check_order(start, end)?;
        let wanted = (end - start).saturating_mul(WIDTH);
        for (plane, given) in [("keys", out.0.len()), ("values", out.1.len())] {
            if given < wanted {
                return Err(KvError::OutputTooShort { plane, given, wanted });
            }
        }
        let (keys, values) = self.read(start, end)?;
        out.0[..wanted].copy_from_slice(&keys);
        out.1[..wanted].copy_from_slice(&values);
        Ok(())
    }

    fn put(&mut self, entries: &[(usize, Row)], timed: bool) -> Result<()> {
        let Some(last) = entries.iter().map(|(at, _)| *at).max() else { return Ok(()) };
        if !self.initialized {
            return Err(KvError::NotInitialized);
        }
        for (at, _) in entries.iter().filter(|(at, _)| *at < self.rows.len()) {
            self.check_changeable(*at..*at + 1, timed)?;
        }
        self.grow(last + 1)?;
        for (at, row) in entries {
            self.rows[*at] = row.clone();
        }
        Ok(())
    }

    fn grow(&mut self, len: usize) -> Result<()> {
        if len > self.rows.len() {
            self.check_unreserved()?;
            self.rows.resize_with(len, zeros);
        }
        Ok(())
    }

    fn room_for(&self, num_tokens: usize) -> Result<Range<usize>> {
        let range = self.rows.len()..self.rows.len().saturating_add(num_tokens);
        if range.end > CAPACITY {
            return Err(KvError::CapacityExceeded { range, capacity: CAPACITY });
        }
        Ok(range)
    }

    fn check_unreserved(&self) -> Result<()> {
        let start = self.rows.len();
        let range = |rows: &Vec<_>| KvError::Reserved { range: start..start + rows.len() };
        self.reserved.as_ref().map(range).map_or(Ok(()), Err)
    }

    fn check_changeable(&self, range: Range<usize>, timed: bool) -> Result<()> {
        if self.reading > 0 {
            return Err(KvError::WouldDeadlock);
        }
        let overlaps = |pin: &&Range<usize>| range.clone().any(|token| pin.contains(&token));
        match self.pins.iter().filter(overlaps).count() {
            0 => Ok(()),
            pins if timed => Err(KvError::Timeout { range, pins }),
            pins => Err(KvError::Pinned { range, pins }),
        }
    }
}

/// Many rows, one after the other.
pub(crate) fn joined(rows: &[Row]) -> Row {
    let keys = rows.iter().flat_map(|(keys, _)| keys.clone()).collect();
    (keys, rows.iter().flat_map(|(_, values)| values.clone()).collect())
}

fn zeros() -> Row {
    (vec![0.0; WIDTH], vec![0.0; WIDTH])
}

fn check_entry(at: usize, (keys, values): &Row) -> Result<()> {
    check_lengths(keys, values)?;
    if keys.len() != WIDTH {
        return Err(KvError::WidthMismatch { given: keys.len(), width: WIDTH });
    }
    if at >= CAPACITY {
        let range = at..at.saturating_add(1);
        return Err(KvError::CapacityExceeded { range, capacity: CAPACITY });
    }
    Ok(())
}

fn check_lengths(keys: &[f32], values: &[f32]) -> Result<()> {
    if keys.len() != values.len() {
        return Err(KvError::LengthMismatch { keys: keys.len(), values: values.len() });
    }
    Ok(())
}

fn check_order(start: usize, end: usize) -> Result<()> {
    if start > end {
        return Err(KvError::InvertedRange { start, end });
    }
    Ok(())
}
