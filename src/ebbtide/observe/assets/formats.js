// Numbers as text, marks of axes, and how the data of the page is read.

const SIZES = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
const TIMES = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]];

function formatSize(bytes) {
  const [unit, size] = SIZES.find(([, each]) => Math.abs(bytes) >= each) ?? SIZES.at(-1);
  const digits = unit === "B" ? 0 : unit === "GiB" ? 2 : 1;
  return `${(bytes / size).toFixed(digits)} ${unit}`;
}

function formatSeconds(seconds) {
  if (!seconds) return "0 s";
  const [unit, length] = TIMES.find(([, each]) => Math.abs(seconds) >= each) ?? TIMES.at(-1);
  const value = seconds / length;
  return `${value >= 1000 ? value.toFixed(0) : Number(value.toPrecision(3))} ${unit}`;
}

/** Round values from `begin` to `end`, about `count` of them, as multiples of 1, 2 or 5. */
function ticks(begin, end, count) {
  const rough = (end - begin) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const first = Math.ceil(begin / step - 1e-9);
  const result = [];
  for (let n = first; n * step <= end + step * 1e-9; n++) result.push(n * step);
  return { step, values: result };
}

/** Ticks in the unit that suits `largest`; each has its place and its text. */
function unitTicks(begin, end, count, units, largest) {
  const [unit, size] = units.find(([, each]) => largest >= each) ?? units.at(-1);
  const { step, values } = ticks(begin / size, end / size, count);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return values.map((each) => ({ at: each * size, text: `${each.toFixed(digits)} ${unit}` }));
}

/** Rows of a table, as Python has written them, as objects. */
function readTable({ columns, of_text, texts, rows }) {
  const isText = columns.map((name) => of_text.includes(name));
  return rows.map((row) =>
    Object.fromEntries(columns.map((name, n) => [name, isText[n] ? texts[row[n]] : row[n]])),
  );
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (each) => each.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** An element with attributes and children; text children are never read as HTML. */
function element(tag, attributes = {}, ...children) {
  const result = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) result.setAttribute(name, value);
  result.append(...children);
  return result;
}

/** Number and name of a layer; modules of an `nn.Sequential` have their number as name. */
function layerName(index, name) {
  return name && name !== String(index) ? `${index} ${name}` : String(index);
}

function swatch({ colour, hatched }) {
  const result = element("span", { class: hatched ? "swatch hatched" : "swatch" });
  result.style.setProperty("--colour", colour);
  return result;
}
