// Numbers as text, how the data of the page is read, and elements.

const SIZES = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
const TIMES = [["s", 1], ["ms", 1e-3], ["us", 1e-6]];

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
