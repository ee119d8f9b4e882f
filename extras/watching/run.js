"use strict";
// A run as the server tells it, piece by piece.

class Run {
  constructor(name) {
    this.name = name;
    this.forget();
    this.events = [];
    this.failures = [];
    this.state = null;
    this.whole = null; // axis of the whole run, by which a zoom finds its steps
  }

  forget() {
    this.view = {};
    this.have = null;
    this.axis = { step: [], tokens: [], time: [] };
    this.series = {};
    this.images = {};
  }

  async ask(zoom) {
    const asked = new URLSearchParams({ run: this.name });
    if (this.have) asked.set("have", this.have);
    if (zoom && this.whole) {
      const x = this.whole.step.map(step => this.position(step, zoom.along, this.whole));
      asked.set("from", Math.floor(interpolate(x, this.whole.step, zoom.low)));
      asked.set("to", Math.ceil(interpolate(x, this.whole.step, zoom.high)));
    }
    const { view } = this,
      response = await fetch(`data?${asked}`),
      reply = await response.json();
    if (!response.ok) throw new Error(reply.error.message);
    if (this.view !== view) return false; // another view was asked for meanwhile
    this.take(reply, zoom);
    return "points" in reply || reply.events.length > 0;
  }

  take(reply, zoom) {
    this.state = reply.state;
    this.heard = performance.now();
    this.have = reply.have;
    this.events = [...this.events.slice(0, reply.known), ...reply.events];
    this.failures = reply.failures;
    if (!reply.points) return;
    const { axis, series, images } = reply.points;
    if (reply.since === null) [this.axis, this.series, this.images] = [axis, series, images];
    else {
      join(this.axis, axis, reply.since);
      for (const [all, added] of [
        [this.series, series],
        [this.images, images],
      ])
        for (const name of Object.keys({ ...all, ...added }))
          join((all[name] ||= {}), added[name], reply.since);
    }
    if (!zoom) this.whole = this.axis;
  }

  // Place of a step on the axis of the page.
  position(step, along, axis = this.axis) {
    if (along === "step") return step;
    const first = along === "time" ? (this.whole || axis).time[0] : 0;
    return interpolate(axis.step, axis[along], step) - first;
  }

  stepOf(when) {
    return interpolate(this.axis.time, this.axis.step, when);
  }
}

// Add points to columns that have a step, in place of those from the step `since` on.
function join(columns, added, since) {
  const before = columns.step || [],
    found = before.findIndex(step => step >= since);
  const end = found < 0 ? before.length : found,
    more = added?.step.length || 0;
  const none = count => Array(count).fill(null); // of a layer that others have
  for (const key of Object.keys({ ...columns, ...added }))
    columns[key] = (columns[key]?.slice(0, end) || none(end)).concat(added?.[key] || none(more));
}
