// The lanes of a trace: one row for each, and below them those of the prediction.

const DARK = ["backward", "reload", "wait"]; // kinds whose labels are white
const HEIGHTS = { compute: 38, release: 16 };
const ROW = 22; // height of other rows; a lane has several where its events overlap
const MOST_ROWS = 6; // of one lane; more events than that at once are drawn over each other

class LaneChart extends Chart {
  constructor(host, run, kinds, laneNames, window_) {
    super(host, "Lanes of the trace. Arrow keys walk through events and lanes.", window_);
    this.kinds = kinds;
    const predicted = run.prediction ? readTable(run.prediction.events) : [];
    this.lanes = [
      ...LaneChart.lanesOf(readTable(run.events), laneNames, false),
      ...LaneChart.lanesOf(predicted, laneNames, true),
    ];
    let top = 4;
    for (const lane of this.lanes) {
      lane.top = top;
      top += lane.height + (lane.name === "compute" ? 4 : 6);
    }
    this.bottom = top;
    this.addLegend();
  }

  static lanesOf(events, laneNames, isPredicted) {
    const names = [laneNames[0], "release", ...laneNames.slice(1)];
    const laneOf = ({ what, lane }) => (what === "release" ? "release" : lane);
    return names
      .map((name) => {
        const here = events.filter((each) => laneOf(each) === name);
        const nested = name === "compute" || name === "release";
        const rows = nested ? here.map(() => 0) : LaneChart.rowsOf(here);
        const numRows = Math.max(1, ...rows.map((row) => row + 1));
        const height = HEIGHTS[name] ?? (numRows > 1 ? numRows * 15 : ROW);
        const items = here.map((event, n) => ({ ...event, row: rows[n] }));
        // An event is drawn over those that enclose it.
        items.sort((a, b) => a.begin_s - b.begin_s || b.end_s - a.end_s);
        return { name, items, numRows, height, isPredicted };
      })
      .filter(({ items }) => items.length);
  }

  /** For each event the first row in which no other overlaps it. */
  static rowsOf(events) {
    const ends = [];
    return events.map(({ begin_s, end_s }) => {
      const free = ends.findIndex((end) => end <= begin_s);
      const row = free < 0 ? Math.min(ends.length, MOST_ROWS - 1) : free;
      ends[row] = end_s;
      return row;
    });
  }

  addLegend() {
    const occurring = new Set(this.lanes.flatMap(({ items }) => items.map(({ what }) => what)));
    const entries = [...occurring].filter((what) => what !== "release");
    const order = Object.keys(this.kinds);
    entries.sort((a, b) => order.indexOf(a) - order.indexOf(b));
    const items = entries.map((what) => element("li", {}, swatch(this.kindOf(what)), what));
    if (occurring.has("release")) items.push(element("li", {}, "▾ release of device memory"));
    this.host.append(element("ul", { class: "legend" }, ...items));
  }

  kindOf(what) {
    return this.kinds[what] ?? this.kinds.other;
  }

  height() {
    return this.bottom + AXIS;
  }

  draw(context, bottom) {
    this.drawNames(context);
    this.clip(context, bottom);
    const fillings = {};
    const { begin, end } = this.window;
    for (const lane of this.lanes) {
      const seen = lane.items.filter(({ begin_s, end_s }) => end_s >= begin && begin_s <= end);
      for (const item of seen) {
        fillings[item.what] ??= this.filling(context, this.kindOf(item.what));
        if (item.what === "release") this.drawRelease(context, lane, item);
        else this.drawEvent(context, lane, item, fillings[item.what]);
      }
      for (const item of seen) this.drawLabel(context, lane, item);
    }
    if (this.chosen) this.outline(context, this.chosen);
  }

  drawNames(context) {
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const { name, top, height, isPredicted } of this.lanes) {
      const words = name === "cpu_optimizer" ? ["optimizer"] : [name];
      if (isPredicted) words.push("predicted");
      words.forEach((word, n) => {
        context.font = this.font(n ? 10 : 11, n ? 400 : 600);
        context.fillStyle = n ? this.colours.quiet : this.colours.ink;
        context.fillText(word, this.left - 7, top + height / 2 + (n - (words.length - 1) / 2) * 11);
      });
    }
  }

  /** The rectangle of an event: left, top, width and height. */
  box(lane, { begin_s, end_s, row }) {
    const left = this.x(begin_s);
    const each = lane.height / lane.numRows;
    return [left, lane.top + row * each, Math.max(1, this.x(end_s) - left), each - 1];
  }

  drawEvent(context, lane, item, filling) {
    const [x, y, width, height] = this.box(lane, item);
    context.globalAlpha = this.isDimmed(item) ? 0.22 : 1;
    context.fillStyle = filling;
    context.fillRect(x, y, width, height);
    if (width > 3) {
      context.fillStyle = this.colours.paper;
      context.fillRect(x, y, 1, height); // tells neighbours apart
    }
    context.globalAlpha = 1;
  }

  /** Whether another layer is marked. */
  isDimmed({ layer }) {
    return this.window.markedLayer !== null && layer !== this.window.markedLayer;
  }

  drawLabel(context, lane, item) {
    const [x, y, width, height] = this.box(lane, item);
    if (item.what === "release" || this.isDimmed(item)) return;
    const left = Math.max(x, this.left);
    const room = Math.min(x + width, this.left + this.width) - left - 6;
    if (room < 12 || height < 12) return;
    context.font = this.font(11, 500);
    const fits = (text) => text && context.measureText(text).width <= room;
    const number = item.layer === null ? "" : `${item.kind.slice(0, 1)}${item.layer}`;
    const text = [LaneChart.labelOf(item), number].find(fits);
    if (!text) return;
    context.fillStyle = DARK.includes(item.what) ? "#ffffff" : "#16202a";
    context.textAlign = "center";
    context.textBaseline = "middle";
    const place = [left + room / 2 + 3, y + height / 2 + 0.5];
    context.lineWidth = 4; // events inside of this one must not cross its label
    context.lineJoin = "round";
    context.strokeStyle = this.kindOf(item.what).colour;
    context.strokeText(text, ...place);
    context.fillText(text, ...place);
  }

  drawRelease(context, lane, item) {
    const x = this.x(item.begin_s);
    context.globalAlpha = this.isDimmed(item) ? 0.22 : 1;
    context.fillStyle = this.colours.mark;
    context.beginPath();
    context.moveTo(x, lane.top + lane.height - 3);
    context.lineTo(x - 4, lane.top + 4);
    context.lineTo(x + 4, lane.top + 4);
    context.fill();
    context.globalAlpha = 1;
  }

  outline(context, item) {
    const lane = this.laneOf(item);
    const [x, y, width, height] = this.box(lane, item);
    context.lineWidth = 2;
    context.strokeStyle = this.colours.mark;
    context.strokeRect(x - 1, y - 1, Math.max(4, width + 2), height + 2);
  }

  laneOf(item) {
    return this.lanes.find(({ items }) => items.includes(item));
  }

  find(x, y) {
    const lane = this.lanes.find(({ top, height }) => y >= top && y < top + height + 4);
    if (!lane) return null;
    const reach = this.timeAt(x + 4) - this.timeAt(x);
    const time = this.timeAt(x);
    const row = Math.min(lane.numRows - 1, Math.floor(((y - lane.top) / lane.height) * lane.numRows));
    const near = lane.items.filter(
      (each) => each.row === row && each.begin_s - reach <= time && each.end_s + reach >= time,
    );
    const missed = ({ begin_s, end_s }) => Math.max(begin_s - time, time - end_s, 0);
    const length = ({ begin_s, end_s }) => end_s - begin_s;
    // What is right under the pointer goes first; of that, the innermost.
    near.sort((a, b) => missed(a) - missed(b) || length(a) - length(b));
    return near[0] ?? null;
  }

  walk(chosen, right, down) {
    if (!chosen) {
      const { items } = this.lanes[0];
      return items.find(({ end_s }) => end_s > this.window.begin) ?? items[0];
    }
    const lane = this.laneOf(chosen);
    if (right) return lane.items[lane.items.indexOf(chosen) + right] ?? chosen;
    const other = this.lanes[this.lanes.indexOf(lane) + down];
    if (!other) return chosen;
    const distance = ({ begin_s }) => Math.abs(begin_s - chosen.begin_s);
    return other.items.reduce((best, each) => (distance(each) < distance(best) ? each : best));
  }

  spanOf({ begin_s, end_s }) {
    return [begin_s, end_s];
  }

  tipTop(item) {
    return this.laneOf(item).top + 40;
  }

  describe(item) {
    const lane = this.laneOf(item);
    const rows = [
      [null, "layer", item.name],
      [null, "begins at", formatSeconds(item.begin_s)],
      [null, "lasts", item.what === "release" ? "" : formatSeconds(item.end_s - item.begin_s)],
      [null, "bytes", item.size_bytes ? formatSize(item.size_bytes) : ""],
      [null, "of", item.kind],
    ].filter(([, , value]) => value);
    const predicted = lane.isPredicted ? ", predicted" : "";
    return { title: `${LaneChart.labelOf(item)} (${lane.name}${predicted})`, rows };
  }

  /** Such as "F3", "offload 3" or "reload w3", as `TraceEvent.label` has it. */
  static labelOf({ what, layer, kind, microbatch }) {
    const isPass = what === "forward" || what === "backward";
    const number = layer === null ? "" : `${isPass ? "" : ` ${kind.slice(0, 1)}`}${layer}`;
    const text = (isPass ? what[0].toUpperCase() : what) + number;
    return microbatch ? `${text}.m${microbatch}` : text;
  }
}
