// The lanes of a trace: one row for each.

const DARK = ["backward", "reload", "step", "wait"]; // kinds whose labels are white
const HEIGHTS = { compute: 38, release: 16 };
const TRACK = 15; // height of one of the tracks that a lane has where its events overlap
const TRACKS = 6; // of one lane; more events than that at once are drawn over each other

/** The lanes of a Chrome trace. A lane has the numbers of 100 threads, of which each is a track. */
function lanesOf(rows, laneNames) {
  const names = [laneNames[0], "release", ...laneNames.slice(1)];
  const laneOf = ({ ph, tid }) => (ph === "i" ? "release" : laneNames[Math.floor(tid / 100)]);
  return names
    .map((name) => {
      const items = rows
        .filter((row) => (row.ph === "i" || row.ph === "X") && laneOf(row) === name)
        .map((row) => ({
          ...row, ...row.args, track: Math.min(row.tid % 100, TRACKS - 1),
          begin_s: row.ts / 1e6, end_s: (row.ts + (row.dur ?? 0)) / 1e6,
        }));
      // An event is drawn over those that enclose it.
      items.sort((a, b) => a.begin_s - b.begin_s || b.end_s - a.end_s);
      const tracks = Math.max(1, ...items.map(({ track }) => track + 1));
      const height = HEIGHTS[name] ?? (tracks > 1 ? tracks * TRACK : 22);
      return { name, items, tracks, height };
    })
    .filter(({ items }) => items.length);
}

class LaneChart extends Chart {
  constructor(host, run, kinds, laneNames) {
    const lanes = lanesOf(run.traceEvents, laneNames);
    const names = new Map(); // by place
    let height = 4;
    lanes.forEach((lane) => {
      lane.top = height;
      names.set(height + lane.height / 2, lane.name.replace("cpu_", ""));
      height += lane.height + 5;
    });
    super(host, "Lanes of the trace. Arrow keys walk through events and lanes.", {
      height,
      data: [view.whole, [null, null]],
      series: [{}, { scale: "lanes" }],
      scales: { lanes: { range: [0, height], dir: -1 } },
      side: {
        scale: "lanes", grid: { show: false }, stroke: () => css("ink"),
        splits: () => [...names.keys()], values: () => [...names.values()],
      },
    });
    Object.assign(this, { kinds, lanes });
    const occurring = new Set(lanes.flatMap(({ items }) => items.map(({ cat }) => cat)));
    const entries = Object.keys(kinds).filter((kind) => occurring.has(kind));
    const items = entries.map((kind) => element("li", {}, swatch(kinds[kind]), kind));
    if (occurring.has("release")) items.push(element("li", {}, "▾ release of device memory"));
    host.append(element("ul", { class: "legend" }, ...items));
  }

  kindOf({ cat }) {
    return this.kinds[cat] ?? this.kinds.other;
  }

  draw(context) {
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const lane of this.lanes) {
      const seen = lane.items.filter(({ begin_s, end_s }) => end_s >= view.begin && begin_s <= view.end);
      for (const item of seen) this.drawEvent(context, item, this.box(lane, item));
      context.globalAlpha = 1;
      for (const item of seen) this.drawLabel(context, item, this.box(lane, item));
      if (lane.items.includes(this.item)) {
        const [x, y, width, height] = this.box(lane, this.item);
        context.lineWidth = 2;
        context.strokeStyle = css("mark");
        context.strokeRect(x - 1, y - 1, Math.max(4, width + 2), height + 2);
      }
    }
  }

  /** The rectangle of an event: left, top, width and height. */
  box(lane, { begin_s, end_s, track }) {
    const [left, height] = [this.x(begin_s), lane.height / lane.tracks];
    return [left, lane.top + track * height, Math.max(1, this.x(end_s) - left), height - 1];
  }

  /** Whether another layer is marked. */
  isDimmed({ layer }) {
    return view.layer !== null && layer !== view.layer;
  }

  drawEvent(context, item, [x, y, width, height]) {
    context.globalAlpha = this.isDimmed(item) ? 0.22 : 1;
    context.fillStyle = this.kindOf(item).colour;
    if (item.cat === "release") {
      context.fillStyle = css("mark");
      context.beginPath();
      for (const [right, down] of [[0, height - 2], [-4, 3], [4, 3]]) context.lineTo(x + right, y + down);
      context.fill();
      return;
    }
    // A gap tells neighbours apart.
    context.fillRect(x + (width > 3 ? 1 : 0), y, width > 3 ? width - 1 : width, height);
  }

  drawLabel(context, item, [x, y, width, height]) {
    if (item.cat === "release" || this.isDimmed(item) || height < 12) return;
    const left = Math.max(x, 0);
    const room = Math.min(x + width, this.width) - left - 6;
    if (room < 6) return;
    context.font = font(11, 500);
    const texts = [item.name, item.name.split(" ").at(-1)]; // "offload 3", or "3" alone
    const text = texts.find((each) => context.measureText(each).width <= room);
    if (!text) return;
    const { colour } = this.kindOf(item); // events inside of this one must not cross its label
    const ink = DARK.includes(item.cat) ? "#fff" : "#16202a";
    write(context, text, left + room / 2 + 3, y + height / 2 + 0.5, ink, colour);
  }

  find(time, y) {
    const lane = this.lanes.find(({ top, height }) => y >= top && y < top + height + 4);
    if (!lane) return null;
    const reach = timeAt(4 / this.width) - view.begin;
    const track = Math.min(lane.tracks - 1, Math.floor(((y - lane.top) / lane.height) * lane.tracks));
    const missed = ({ begin_s, end_s }) => Math.max(begin_s - time, time - end_s, 0);
    const length = ({ begin_s, end_s }) => end_s - begin_s;
    const near = lane.items.filter((each) => each.track === track && missed(each) <= reach);
    // What is right under the pointer goes first; of that, the innermost.
    return near.sort((a, b) => missed(a) - missed(b) || length(a) - length(b))[0] ?? null;
  }

  laneOf(item) {
    return this.lanes.find(({ items }) => items.includes(item));
  }

  walk(item, right, down) {
    const { items } = this.lanes[0];
    if (!item) return items.find(({ end_s }) => end_s > view.begin) ?? items[0];
    const lane = this.laneOf(item);
    if (right) return lane.items[lane.items.indexOf(item) + right] ?? item;
    const other = this.lanes[this.lanes.indexOf(lane) + down];
    const distance = ({ begin_s }) => Math.abs(begin_s - item.begin_s);
    return other?.items.reduce((best, each) => (distance(each) < distance(best) ? each : best)) ?? item;
  }

  top(item) {
    const [, y, , height] = this.box(this.laneOf(item), item);
    return y + height / 2;
  }

  tell(item) {
    if (!item) return "";
    const { name } = this.laneOf(item);
    const words = [
      `${item.name} (${name})`, item.module,
      item.size_bytes && formatSize(item.size_bytes),
      `begins at ${formatSeconds(item.begin_s)}`,
      item.cat !== "release" && `lasts ${formatSeconds(item.end_s - item.begin_s)}`,
    ];
    return words.filter(Boolean).join(", ");
  }
}

/** Open Perfetto in a new tab and hand it the trace, as soon as it answers. */
function openInPerfetto(run) {
  const origin = "https://ui.perfetto.dev";
  const tab = open(origin);
  if (!tab) return; // the browser keeps pages from opening others
  const timer = setInterval(() => (tab.closed ? clearInterval(timer) : tab.postMessage("PING", origin)), 100);
  addEventListener("message", function answer({ source, data }) {
    if (source !== tab || data !== "PONG") return;
    clearInterval(timer);
    removeEventListener("message", answer);
    const { buffer } = new TextEncoder().encode(JSON.stringify(run));
    tab.postMessage({ perfetto: { buffer, title: run.ebbtide.title } }, origin);
  });
}
