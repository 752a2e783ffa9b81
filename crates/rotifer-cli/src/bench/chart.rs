//! The chart of a benchmark: speed and memory by number of ranks, side by side.

use std::io;
use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::prelude::*;
use rotifer::bench::{Measured, Outcome, Report, Spread, Variant};

/// Pixels.
const SIZE: (u32, u32) = (1280, 600);
const LEGEND_HEIGHT: u32 = 44;
const FONT: &str = "sans-serif";

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), io::Error>;

/// One of the two panels.
struct Panel<'a> {
    title: &'a str,
    unit: &'a str,
    /// The median is the height of the bar, the extremes are those of its whisker.
    value: fn(&Measured) -> Spread,
    /// A line across all bars of so many ranks.
    ideal: Option<&'a dyn Fn(usize) -> f64>,
}

/// The chart, as the text of an SVG file.
///
/// # Errors
/// If it cannot be laid out.
pub fn svg(report: &Report) -> Result<String, io::Error> {
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        root.fill(&WHITE).map_err(fault)?;
        let root = root.margin(10, 0, 0, 0);
        let title = format!(
            "{}: {:.1} M parameters, global batch {} x {}",
            report.config,
            report.parameters as f64 / 1e6,
            report.batch,
            report.seq
        );
        let root = root.titled(&title, (FONT, 22)).map_err(fault)?;
        let (_, height) = root.dim_in_pixel();
        let (panels, foot) = root.split_vertically(height - LEGEND_HEIGHT);
        let (left, right) = panels.split_horizontally(SIZE.0 / 2);
        let one_rank = mib(report.one_rank.total);
        let speed = Panel {
            title: "Speed: median, with slowest and fastest step",
            unit: "tokens/s",
            value: |m| m.tokens_per_sec,
            ideal: None,
        };
        let memory = Panel {
            title: "Memory: peak of a rank",
            unit: "MiB per rank",
            value: |m| {
                let peak = mib(m.peak.total);
                Spread { median: peak, min: peak, max: peak }
            },
            ideal: Some(&|ranks| one_rank / ranks as f64),
        };
        panel(&left, &speed, report)?;
        panel(&right, &memory, report)?;
        legend(&foot, report)?;
        root.present().map_err(fault)?;
    }
    Ok(text)
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The strategies, in the order of the report.
fn variants(report: &Report) -> Vec<Variant> {
    let mut variants = Vec::new();
    for row in &report.rows {
        if !variants.contains(&row.strategy) {
            variants.push(row.strategy);
        }
    }
    variants
}

/// One group of bars per number of ranks, one bar per strategy; a strategy that is not possible
/// leaves its place empty.
fn panel(area: &Area<'_>, panel: &Panel<'_>, report: &Report) -> Drawn {
    let variants = variants(report);
    let groups: Vec<usize> = report.worlds.iter().map(|world| world.ranks).collect();
    let mut bars = Vec::new();
    for row in &report.rows {
        let Outcome::Measured(measured) = &row.outcome else { continue };
        let group = groups.iter().position(|n| *n == row.ranks).expect("a world of each row");
        let place = variants.iter().position(|v| *v == row.strategy).expect("a listed strategy");
        bars.push((group, place, row.strategy, (panel.value)(measured)));
    }
    let ideals = groups.iter().enumerate().filter_map(|(g, n)| Some((g, panel.ideal?(*n))));
    let ideals: Vec<(usize, f64)> = ideals.collect();
    let tops = bars.iter().map(|(_, _, _, value)| value.max).chain(ideals.iter().map(|i| i.1));
    let top = tops.fold(0.0, f64::max) * 1.06;
    let mut chart = ChartBuilder::on(area)
        .caption(panel.title, (FONT, 17))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(74)
        .build_cartesian_2d(Groups(groups.len()), 0.0..top)
        .map_err(fault)?;
    let name = |x: &f64| groups.get(x.round() as usize).map_or(String::new(), usize::to_string);
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(WHITE)
        .x_desc("ranks")
        .y_desc(panel.unit)
        .axis_desc_style((FONT, 15))
        .label_style((FONT, 14))
        .x_label_formatter(&name)
        .y_label_formatter(&|y| number(*y))
        .draw()
        .map_err(fault)?;
    // Of a group's width; few bars stay bars.
    let width = (0.84 / variants.len() as f64).min(0.2);
    let left = |group: usize, place: usize| {
        group as f64 + (place as f64 - 0.5 * variants.len() as f64) * width
    };
    let rectangles = bars.iter().map(|&(group, place, variant, value)| {
        let x = left(group, place);
        let corners = [(x + 0.06 * width, 0.0), (x + 0.94 * width, value.median)];
        Rectangle::new(corners, colour(variant).filled())
    });
    chart.draw_series(rectangles).map_err(fault)?;
    let ranges = bars.iter().filter(|(_, _, _, value)| value.min < value.max);
    let whiskers = ranges.map(|&(group, place, _, Spread { median, min, max })| {
        let x = left(group, place) + 0.5 * width;
        ErrorBar::new_vertical(x, min, median, max, BLACK.filled(), 6)
    });
    chart.draw_series(whiskers).map_err(fault)?;
    let lines = ideals.iter().map(|&(group, y)| {
        let x = group as f64;
        PathElement::new(vec![(x - 0.46, y), (x + 0.46, y)], BLACK.stroke_width(2))
    });
    chart.draw_series(lines).map_err(fault)?;
    Ok(())
}

/// An axis of so many groups of bars, with its ticks in their middles: 0, 1, and so on.
struct Groups(usize);

impl Ranged for Groups {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (low, high): (i32, i32)) -> i32 {
        let part = (value + 0.5) / self.0 as f64;
        low + (part * f64::from(high - low)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        (0..self.0).map(|group| group as f64).collect()
    }

    fn range(&self) -> Range<f64> {
        -0.5..self.0 as f64 - 0.5
    }
}

/// What the colours stand for, in one line below both panels.
fn legend(area: &Area<'_>, report: &Report) -> Drawn {
    const ENTRY: i32 = 128;
    let variants = variants(report);
    let entries = variants.len() as i32 + 1;
    let left = (SIZE.0 as i32 - entries * ENTRY) / 2;
    let style = (FONT, 15).into_font().color(&BLACK);
    let label = |text: &str, x: i32| area.draw_text(text, &style, (x + 22, 13)).map_err(fault);
    for (i, variant) in variants.iter().enumerate() {
        let x = left + i as i32 * ENTRY;
        let key = Rectangle::new([(x, 12), (x + 16, 26)], colour(*variant).filled());
        area.draw(&key).map_err(fault)?;
        label(variant.name(), x)?;
    }
    let x = left + (entries - 1) * ENTRY;
    let key = PathElement::new(vec![(x, 19), (x + 16, 19)], BLACK.stroke_width(2));
    area.draw(&key).map_err(fault)?;
    label("one rank / N", x)
}

/// A label of an axis: short, and exact where it is small.
fn number(value: f64) -> String {
    match value {
        0.0 => "0".into(),
        v if v >= 1e6 => format!("{:.1} M", v / 1e6),
        v if v >= 1e4 => format!("{:.1} k", v / 1e3),
        v if v >= 10.0 => format!("{v:.0}"),
        v => format!("{v:.2}"),
    }
}

/// One colour per strategy in all charts, told apart by colour-blind readers as well (Okabe and
/// Ito 2008, with a brown and a grey in the place of yellow and black, which bars cannot have).
const fn colour(variant: Variant) -> RGBColor {
    match variant {
        Variant::Rtp => RGBColor(0, 114, 178),
        Variant::RtpCopy => RGBColor(86, 180, 233),
        Variant::RtpInplace => RGBColor(0, 158, 115),
        Variant::Ddp => RGBColor(230, 159, 0),
        Variant::Zero1 => RGBColor(204, 121, 167),
        Variant::Fsdp => RGBColor(213, 94, 0),
        Variant::FsdpKeep => RGBColor(140, 86, 75),
        Variant::Tp => RGBColor(110, 110, 110),
    }
}

/// Drawing into a string has no errors of its own; what is left is a layout without room.
fn fault<E: std::error::Error + Send + Sync>(error: DrawingAreaErrorKind<E>) -> io::Error {
    io::Error::other(error.to_string())
}
