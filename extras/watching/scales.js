"use strict";
// Elements, numbers as text, and scales.

const SVG = "http://www.w3.org/2000/svg";

function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    key in made ? (made[key] = value) : made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// --- numbers as text ----------------------------------------------------------------------------

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "not finite";
  const size = Math.abs(value);
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  if (size && size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

const percent = value => (value === null ? "not finite" : `${(100 * value).toFixed(1)} %`);

function short(value) {
  for (const [size, unit] of [
    [1e12, " T"],
    [1e9, " B"],
    [1e6, " M"],
    [1e3, " k"],
  ])
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${unit}`;
  return value && Math.abs(value) < 1e-3
    ? value.toExponential(0)
    : String(Number(value.toPrecision(3)));
}

function duration(seconds) {
  const all = Math.max(0, Math.round(seconds)),
    two = n => String(n).padStart(2, "0");
  const [d, h, m, s] = [all / 86400, (all / 3600) % 24, (all / 60) % 60, all % 60].map(Math.floor);
  return d ? `${d}d${two(h)}h` : h ? `${h}h${two(m)}m` : m ? `${m}m${two(s)}s` : `${s}s`;
}

// --- scales -------------------------------------------------------------------------------------

// Round numbers from low to high, some `count` of them, `least` or more apart.
function ticks(low, high, count, least = 0) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count,
    power = 10 ** Math.floor(Math.log10(raw));
  const factors = power < 10 ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10];
  const step = Math.max(least, power * factors.find(factor => factor * power >= raw * 0.999));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
    found.push(Number((i * step).toPrecision(12)));
  return found;
}

function timeTicks(low, high, count) {
  const steps = [
    1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
    172800, 432000, 864000,
  ];
  const step = steps.find(each => (high - low) / each <= count) || steps.at(-1);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
  return found;
}

function logTicks(low, high) {
  const factors = high / low > 300 ? [1] : [1, 2, 5],
    found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++)
    for (const factor of factors) {
      const value = Number((factor * 10 ** power).toPrecision(3));
      if (value >= low && value <= high) found.push(value);
    }
  return found;
}

// Index of the place of the value that is nearest to x in a rising list; -1 without any.
function nearest(list, x) {
  let low = 0,
    high = list.length - 1;
  if (high < 0) return -1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    list[middle] < x ? (low = middle) : (high = middle);
  }
  return x - list[low] <= list[high] - x ? low : high;
}

// Value at x of a line through points with rising xs; straight on beyond them it stays level.
function interpolate(xs, ys, x) {
  if (!xs.length) return null;
  if (x <= xs[0]) return ys[0];
  if (x >= xs.at(-1)) return ys.at(-1);
  let low = 0,
    high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    xs[middle] <= x ? (low = middle) : (high = middle);
  }
  return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low] || 1);
}

// Means of `window` values around each; the window shrinks near the ends and stays centred. It ends
// at the indices of `cuts` too, where a launch or a phase begins.
function centred(values, window, cuts) {
  const half = window >> 1,
    ends = [...cuts, values.length];
  let first = 0,
    next = 0;
  return values.map((value, i) => {
    while (ends[next] <= i) first = ends[next++];
    if (value === null) return null;
    const reach = Math.min(half, i - first, ends[next] - 1 - i);
    let sum = 0,
      count = 0;
    for (let j = i - reach; j <= i + reach; j++)
      if (values[j] !== null) {
        sum += values[j];
        count++;
      }
    return sum / count;
  });
}

function smoothing(count) {
  const window = Math.min(21, Math.floor(count / 10));
  return Math.max(1, window - 1 + (window % 2));
}
