// Memory over time: areas stacked by owner, the peak, and what was predicted.

const HEADROOM = 1.2; // of the axis above the highest value, for the label of the peak

class MemoryChart extends Chart {
  /** `most` is the largest number of bytes that any chart of the page shows. */
  constructor(host, run, owners, window_, most) {
    super(host, "Memory over the step, by owner. Arrow keys walk through its phases.", window_);
    this.run = run;
    this.most = most;
    this.owners = (run.memory?.owners ?? []).map((name) => owners[name]);
    this.phases = MemoryChart.phasesOf(run);
    this.predicted = MemoryChart.predictedOf(run, this.phases);
    if (!this.phases.length) this.phases = this.predicted;
  }

  static phasesOf({ memory }) {
    return (memory?.samples ?? []).map(([phase, begin, end, peak, ...sizes], index) => ({
      phase, begin, end, peak, sizes, index,
    }));
  }

  /** Predicted phases: under the measured ones of their names, or else when they were predicted. */
  static predictedOf({ prediction }, phases) {
    const predicted = (prediction ? readTable(prediction.phases) : []).map((each, index) => ({
      phase: each.phase, begin: each.begin_s, end: each.end_s, peak: each.peak_bytes,
      sizes: [], index,
    }));
    if (!phases.length) return predicted;
    const byName = new Map(predicted.map((each) => [each.phase, each.peak]));
    return phases
      .filter(({ phase }) => byName.has(phase) && !phase.includes("outside"))
      .map((each) => ({ ...each, peak: byName.get(each.phase) }));
  }

  /** The largest number of bytes that the chart of a run shows. */
  static mostOf(run) {
    const measured = MemoryChart.phasesOf(run);
    const phases = [...measured, ...MemoryChart.predictedOf(run, measured)];
    const levels = [run.budget_bytes, run.limit_bytes, run.memory?.reserved_peak_bytes];
    return Math.max(0, ...phases.map(({ peak }) => peak), ...levels.map((each) => each ?? 0));
  }

  height() {
    return this.host.clientWidth < 480 ? 260 : 330;
  }

  y(bytes) {
    const bottom = this.height() - AXIS;
    return bottom - (bytes / (this.most * HEADROOM || 1)) * (bottom - 4);
  }

  draw(context, bottom) {
    this.drawSizes(context);
    this.clip(context, bottom);
    const fillings = this.owners.map((owner) => this.filling(context, owner));
    for (const { from, to, phase } of this.columns()) {
      this.drawColumn(context, fillings, from, to - from, phase);
    }
    this.drawPredicted(context);
    this.drawPeak(context);
    this.drawLevels(context);
    this.drawChosen(context, bottom);
  }

  drawSizes(context) {
    context.font = this.font(11);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const { at, text } of unitTicks(0, this.most * HEADROOM, 5, SIZES, this.most)) {
      const y = Math.round(this.y(at));
      context.fillStyle = at ? this.colours.grid : this.colours.line;
      context.fillRect(this.left, y, this.width, 1);
      context.fillStyle = this.colours.quiet;
      context.fillText(text, this.left - 6, Math.max(7, y));
    }
  }

  /** Stretches of pixels and the phase that each shows: the highest of those that share a pixel. */
  columns() {
    const result = [];
    let next = 0;
    for (let px = 0; px < this.width; px++) {
      const [begin, end] = [this.timeAt(this.left + px), this.timeAt(this.left + px + 1)];
      while (next < this.phases.length && this.phases[next].end <= begin) next++;
      let highest = null;
      for (let n = next; n < this.phases.length && this.phases[n].begin < end; n++) {
        if (!highest || this.phases[n].peak > highest.peak) highest = this.phases[n];
      }
      if (!highest) continue;
      const last = result.at(-1);
      const x = this.left + px;
      if (last?.phase === highest && last.to === x) last.to = x + 1;
      else result.push({ from: x, to: x + 1, phase: highest });
    }
    return result;
  }

  drawColumn(context, fillings, x, width, { sizes }) {
    let below = 0;
    sizes.forEach((size, n) => {
      if (!size) return;
      const [top, bottom] = [this.y(below + size), this.y(below)];
      context.fillStyle = fillings[n];
      context.fillRect(x, top, width, bottom - top);
      if (bottom - top > 4) {
        context.fillStyle = this.colours.paper;
        context.fillRect(x, top, width, 1); // tells neighbours apart
      }
      below += size;
    });
  }

  drawPredicted(context) {
    context.beginPath();
    let last = null;
    for (const phase of this.predicted) {
      const [left, right] = [this.x(phase.begin), this.x(phase.end)];
      const y = this.y(phase.peak);
      if (last?.index === phase.index - 1) context.lineTo(left, y);
      else context.moveTo(left, y);
      context.lineTo(right, y);
      last = phase;
    }
    context.setLineDash([]);
    context.lineWidth = 4;
    context.strokeStyle = this.colours.paper;
    context.stroke();
    context.setLineDash([5, 3]);
    context.lineWidth = 2;
    context.strokeStyle = this.colours.mark;
    context.stroke();
    context.setLineDash([]);
  }

  /** Horizontal lines: the budget, the limit of all offloaders, what the allocator has taken. */
  drawLevels(context) {
    const { run } = this;
    const reserved = run.memory?.reserved_peak_bytes ?? 0;
    const peak = run.memory?.samples[run.memory.peak][3] ?? 0;
    const levels = [
      ["budget", run.budget_bytes],
      ["no offloader gets below", run.limit_bytes],
      ["taken by the allocator", reserved > peak * 1.005 ? reserved : null],
    ].filter(([, bytes]) => bytes);
    context.font = this.font(11, 600);
    context.textBaseline = "bottom";
    context.textAlign = "left";
    for (const [name, bytes] of levels) {
      const y = Math.round(this.y(bytes)) + 0.5;
      context.beginPath();
      context.moveTo(this.left, y);
      context.lineTo(this.left + this.width, y);
      context.lineWidth = 1.5;
      context.setLineDash([2, 3]);
      context.strokeStyle = this.colours.mark;
      context.stroke();
      context.setLineDash([]);
      this.drawOutlined(context, `${name} ${formatSize(bytes)}`, this.left + 6, y - 3);
    }
  }

  /** A pointer at the peak, and above all that is drawn its label. */
  drawPeak(context) {
    const { memory } = this.run;
    if (!memory) return;
    const sample = this.phases[memory.peak];
    const [begin, end] = [Math.max(sample.begin, this.window.begin), Math.min(sample.end, this.window.end)];
    if (begin > end) return;
    const [x, y] = [this.x((begin + end) / 2), this.y(sample.peak)];
    context.fillStyle = this.colours.mark;
    context.fillRect(x - 0.75, 16, 1.5, Math.max(0, y - 24));
    context.beginPath();
    context.moveTo(x, y - 1);
    context.lineTo(x - 5, y - 9);
    context.lineTo(x + 5, y - 9);
    context.fill();
    context.font = this.font(12, 700);
    const short = `peak ${formatSize(sample.peak)}`;
    const long = `${short} in ${sample.phase}`;
    const text = context.measureText(long).width < this.width - 4 ? long : short;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const half = context.measureText(text).width / 2 + 2;
    const most = this.left + this.width - half;
    this.drawOutlined(context, text, Math.min(Math.max(x, this.left + half), most), 9);
  }

  drawChosen(context, bottom) {
    if (!this.chosen) return;
    const [left, right] = [this.x(this.chosen.begin), this.x(this.chosen.end)];
    const y = this.y(this.chosen.peak);
    context.lineWidth = 2;
    context.strokeStyle = this.colours.mark;
    context.strokeRect(left, y, Math.max(2, right - left), bottom - y);
  }

  find(x) {
    const begin = this.timeAt(x - 1);
    const end = this.timeAt(x + 1);
    const here = this.phases.filter((each) => each.begin < end && each.end > begin);
    return here.reduce((best, each) => (best && best.peak >= each.peak ? best : each), null);
  }

  walk(chosen, right) {
    if (!chosen) return this.phases[this.run.memory?.peak ?? 0];
    return this.phases[chosen.index + right] ?? chosen;
  }

  spanOf({ begin, end }) {
    return [begin, end];
  }

  describe({ phase, begin, end, peak, sizes, index }) {
    const parts = sizes
      .map((size, n) => [this.owners[n], this.owners[n].label, size])
      .filter(([, , size]) => size)
      .reverse() // as they are stacked
      .map(([mark, name, size]) => [mark, name, formatSize(size)]);
    const rows = [...parts, [null, "lasts", formatSeconds(end - begin)]];
    const isMeasured = this.run.memory !== null;
    const predicted = isMeasured && this.predicted.find((each) => each.index === index);
    if (predicted) rows.push([null, "predicted peak", formatSize(predicted.peak)]);
    return { title: `${phase}: ${formatSize(peak)}${isMeasured ? "" : " predicted"}`, rows };
  }
}

/** What memory held at the peak, by owner and by layer. It is the legend of the chart, too. */
function showBreakdown(host, run, owners) {
  if (!run.memory) return;
  const { memory } = run;
  const [phase, , , peak, ...sizes] = memory.samples[memory.peak];
  const row = (owner, name, size, ...remark) =>
    element(
      "tr", size ? {} : { class: "none" },
      element("td", {}, swatch(owner), name, ...remark),
      element("td", { class: "size" }, size ? formatSize(size) : "–"),
      element("td", { class: "share" }, size ? `${Math.round((size / peak) * 100)}%` : ""),
    );
  const byOwner = memory.owners
    .map((name, n) => [owners[name], owners[name].label, sizes[n]])
    .reverse()
    .map((each) => row(...each));
  const layers = memory.peak_owned.filter(([, , layer]) => layer !== null);
  const byLayer = layers
    .slice(0, 10)
    .map(([owner, size, layer, name]) => {
      const remark = element("small", {}, ` ${owners[owner].label}`);
      return row(owners[owner], layerName(layer, name), size, remark);
    });
  const part = (title, rows) =>
    element("div", {}, element("h3", {}, title), element("table", {}, element("tbody", {}, ...rows)));
  host.append(part(`At the peak, in ${phase}: ${formatSize(peak)}`, byOwner));
  if (byLayer.length) {
    const more = layers.length > byLayer.length ? `, the largest ${byLayer.length} of ${layers.length}` : "";
    host.append(part(`Of it, by layer${more}`, byLayer));
  }
}
