// The stretch of time that charts show. All charts of a page share one, so they zoom together.

class TimeWindow {
  constructor(begin, end) {
    this.whole = { begin, end: Math.max(end, begin + 1e-9) };
    this.begin = this.whole.begin;
    this.end = this.whole.end;
    this.cursor = null; // the time under the pointer, if there is one
    this.markedLayer = null; // the layer whose events are to stand out
    this.listeners = [];
  }

  get length() {
    return this.end - this.begin;
  }

  get isWhole() {
    return this.begin === this.whole.begin && this.end === this.whole.end;
  }

  show(begin, end) {
    const whole = this.whole.end - this.whole.begin;
    const wanted = Math.max(end - begin, whole * 1e-6);
    const length = wanted > whole * (1 - 1e-9) ? whole : wanted; // rounding must not leave a rest
    const first = Math.min(Math.max(begin, this.whole.begin), this.whole.end - length);
    this.begin = length === whole ? this.whole.begin : first;
    this.end = length === whole ? this.whole.end : first + length;
    this.tell();
  }

  showAll() {
    this.show(this.whole.begin, this.whole.end);
  }

  /** Make the window `factor` times as long; the time `around` keeps its place. */
  zoom(factor, around = (this.begin + this.end) / 2) {
    const begin = around - (around - this.begin) * factor;
    this.show(begin, begin + this.length * factor);
  }

  /** Move by a share of what is seen; to the right if it is positive. */
  move(share) {
    const by = this.length * share;
    this.show(this.begin + by, this.end + by);
  }

  /** Move as far as it takes to see a stretch of time. */
  reveal(begin, end) {
    if (end > this.end) this.move((end - this.end) / this.length + 0.1);
    if (begin < this.begin) this.move((begin - this.begin) / this.length - 0.1);
  }

  pointAt(time) {
    if (this.cursor === time) return;
    this.cursor = time;
    this.tell();
  }

  mark(layer) {
    this.markedLayer = layer;
    this.tell();
  }

  tell() {
    for (const listener of this.listeners) listener();
  }
}
