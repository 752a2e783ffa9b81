//! Rows of a table by token id, and the scatter that is their backward.

use super::bias::add_to;
use super::team::{Team, part};
use super::view::{Rows, Span};

/// Row of the table for an id, if this part of the table has it.
#[inline(always)]
fn row_of(id: i32, first: usize, rows: usize) -> Option<usize> {
    let row = usize::try_from(id).ok()?.checked_sub(first)?;
    (row < rows).then_some(row)
}

/// `y[i, :] = table[ids[i] - first, :]` or `+=`.
pub(super) fn embedding(team: Team, ids: Span<i32>, table: Rows, first: usize, y: Rows, add: bool) {
    let per = Team::rows_per_task(y.cols);
    team.each(
        y.rows.div_ceil(per),
        #[inline(always)]
        |task| {
            for i in part(task, per, y.rows) {
                // SAFETY: ids and table are only read; row i of y is this task's own.
                unsafe {
                    if let Some(row) = row_of(ids.slice(i..i + 1)[0], first, table.rows) {
                        if add {
                            add_to(y.row_mut(i), table.row(row));
                        } else {
                            y.row_mut(i).copy_from_slice(table.row(row));
                        }
                    }
                }
            }
        },
    );
}

/// `dtable[ids[i] - first, :] += dy[i, :]`, in the order of i.
///
/// Two tokens may have one id, so threads share out the channels, not the tokens.
pub(super) fn backward(team: Team, ids: Span<i32>, dy: Rows, dtable: Rows, first: usize) {
    let per = dy.cols.div_ceil(team.threads).next_multiple_of(16);
    team.each(
        dy.cols.div_ceil(per),
        #[inline(always)]
        |task| {
            let channels = part(task, per, dy.cols);
            for i in 0..dy.rows {
                // SAFETY: ids and dy are only read.
                let (id, from) = unsafe { (ids.slice(i..i + 1)[0], &dy.row(i)[channels.clone()]) };
                if let Some(row) = row_of(id, first, dtable.rows) {
                    let to = dtable.ptr(row).wrapping_add(channels.start);
                    // SAFETY: these channels of every row are this task's own.
                    add_to(unsafe { std::slice::from_raw_parts_mut(to, channels.len()) }, from);
                }
            }
        },
    );
}
