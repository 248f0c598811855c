"""Style sheet and script of the pages, written into each page so that nothing is fetched."""

PAGE_CSS = """
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1080px;margin:0 auto;padding:36px 24px 64px}
header .brand{color:var(--soft);letter-spacing:.08em;text-transform:uppercase;font-size:12px}
h1{margin:.1em 0 .15em;font-size:34px;line-height:1.15;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{margin:0 0 2px;font-size:19px}
p{margin:0 0 8px}p.note,.soft{color:var(--soft)}p.note{font-size:13.5px;margin-bottom:12px}
.pill{display:inline-block;margin-left:10px;padding:2px 12px;border-radius:99px;font-size:13px;
font-weight:600;letter-spacing:0;vertical-align:middle;color:#fff;background:var(--grey)}
.pill.finished{background:#00805d}.pill.prepared,.pill.running{background:#0072b2}.pill.broken{background:#b84a00}
.pill.interrupted,.pill.killed{background:#6a5a22}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(215px,1fr));gap:12px;margin:22px 0}
.tile,section{background:var(--card);border:1px solid var(--line);border-radius:12px}
.tile{padding:12px 16px}.tile .name{color:var(--soft);font-size:13px}
.tile .value{font-size:24px;font-weight:600;line-height:1.3;font-variant-numeric:tabular-nums}
.tile .more{color:var(--soft);font-size:13px}
.tile.outside{border-color:var(--red)}.tile.outside .more,p.warning{color:var(--red)}
section{padding:20px 22px;margin-top:18px}
section.faults{border-color:var(--red)}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th{text-align:left;color:var(--soft);font-weight:500;font-size:13px}
th,td{padding:6px 10px 6px 0;border-bottom:1px solid var(--line);vertical-align:middle}
tr:last-child td{border-bottom:0}td.number,th.number{text-align:right;white-space:nowrap}
td.bars{width:42%}td.wide{overflow-wrap:anywhere}
.bar{display:block;height:8px;border-radius:2px;min-width:1px;margin:2px 0}
.bar.predicted{opacity:.42}
.beside{display:flex;gap:1px}.beside .bar{height:14px}
.stack{display:flex;height:26px;border-radius:6px;overflow:hidden;margin:12px 0 8px;gap:1px}
.stack span{min-width:2px}
.keys{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;color:var(--soft)}
.keys i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
pre.plan{columns:260px 3}pre.sample{white-space:pre-wrap;overflow-wrap:anywhere}
pre{margin:0;overflow-x:auto;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,monospace}
details summary{cursor:pointer;color:var(--soft)}details[open] summary{margin-bottom:8px}
figure{margin:0;position:relative}figure+h2,h2.next{margin-top:22px}
figure .hair{position:absolute;width:1px;background:var(--soft);opacity:.5;pointer-events:none}
figure .tip{position:absolute;pointer-events:none;background:var(--card);white-space:nowrap;
border:1px solid var(--line);border-radius:8px;padding:6px 10px;font-size:13px;z-index:2;
box-shadow:0 4px 14px #0002;font-variant-numeric:tabular-nums}
[hidden]{display:none}
@media(max-width:720px){
main{padding:18px 10px 40px}section{padding:14px}h1{font-size:25px}
.tiles{grid-template-columns:1fr 1fr;gap:8px}.tile{padding:10px 12px}.tile .value{font-size:19px}
figure,section{overflow-x:auto}figure svg{min-width:760px}
}
@media print{section,.tile{break-inside:avoid}body{background:#fff}}
"""

PAGE_SCRIPT = """
(function () {
  function number(value) { return Number(value.toPrecision(4)).toString(); }
  document.querySelectorAll("figure.chart").forEach(function (figure) {
    var svg = figure.querySelector("svg"), desc = svg && svg.querySelector("desc.points");
    if (!desc) { return; }
    var data = JSON.parse(desc.textContent), tip = document.createElement("div");
    var hair = document.createElement("div");
    tip.className = "tip"; hair.className = "hair"; tip.hidden = hair.hidden = true;
    figure.append(hair, tip);
    svg.addEventListener("mouseleave", function () { tip.hidden = hair.hidden = true; });
    svg.addEventListener("mousemove", function (event) {
      var box = svg.getBoundingClientRect(), zoom = box.width / svg.viewBox.baseVal.width;
      var at = (event.clientX - box.left) / zoom;
      if (at < data.left || at > data.right) { tip.hidden = hair.hidden = true; return; }
      var share = (at - data.left) / (data.right - data.left);
      var x = data.low + share * (data.high - data.low), shown = x, nearest = Infinity;
      var lines = data.series.map(function (one) {
        var best = 0;
        one.x.forEach(function (value, index) {
          if (Math.abs(value - x) < Math.abs(one.x[best] - x)) { best = index; }
        });
        if (Math.abs(one.x[best] - x) < nearest) {
          nearest = Math.abs(one.x[best] - x); shown = one.x[best];
        }
        return one.name + ": " + number(one.y[best] / data.y[0]) + " " + data.y[1];
      });
      tip.replaceChildren();
      var first = document.createElement("b");
      first.textContent = data.x[0] + " " + number(shown / data.x[1]) + " " + data.x[2];
      tip.append(first);
      lines.forEach(function (line) {
        var row = document.createElement("div"); row.textContent = line; tip.append(row);
      });
      tip.hidden = hair.hidden = false;
      hair.style.left = at * zoom + "px"; hair.style.top = data.top * zoom + "px";
      hair.style.height = (data.bottom - data.top) * zoom + "px";
      var left = at * zoom + 14;
      if (left + tip.offsetWidth > box.width) { left = at * zoom - 14 - tip.offsetWidth; }
      tip.style.left = left + "px"; tip.style.top = data.top * zoom + "px";
    });
  });
  document.querySelectorAll("svg.lanes").forEach(function (svg) {
    var left = +svg.dataset.left, right = +svg.dataset.right, end = +svg.dataset.end;
    var moving = svg.querySelector(".moving"), clock = svg.querySelector(".clock");
    var low = 0, high = end, from = null;
    if (!moving) { return; }
    function mark(tag, attributes, text) {
      var node = document.createElementNS("http://www.w3.org/2000/svg", tag);
      Object.keys(attributes).forEach(function (key) { node.setAttribute(key, attributes[key]); });
      node.textContent = text; clock.append(node);
    }
    function draw() {
      var zoom = end / (high - low), shift = left - left * zoom - low / end * (right - left) * zoom;
      moving.setAttribute("transform", "translate(" + shift + " 0) scale(" + zoom + " 1)");
      var raw = (high - low) / 8, power = Math.pow(10, Math.floor(Math.log10(raw)));
      var step = [1, 2, 5, 10].map(function (m) { return m * power; })
        .find(function (s) { return s >= raw * 0.999; });
      var y = +clock.dataset.y;
      clock.replaceChildren();
      for (var t = Math.ceil(low / step - 1e-9) * step; t <= high * (1 + 1e-9); t += step) {
        var x = left + (t - low) / (high - low) * (right - left);
        mark("line", {x1: x, x2: x, y1: 28, y2: y + 2, "class": "grid"}, "");
        mark("text", {x: x, y: y + 16, "text-anchor": "middle"}, String(Number(t.toPrecision(6))));
      }
    }
    function place(event) {
      var box = svg.getBoundingClientRect();
      var at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      return Math.min(1, Math.max(0, (at - left) / (right - left)));
    }
    function show(start, span) {
      span = Math.min(end, Math.max(end / 400, span));
      low = Math.min(end - span, Math.max(0, start)); high = low + span; draw();
    }
    svg.addEventListener("wheel", function (event) {
      event.preventDefault();
      var share = place(event), span = (high - low) * Math.exp(event.deltaY / 400);
      show(low + share * (high - low - span), span);
    }, {passive: false});
    svg.addEventListener("mousedown", function (event) { from = {share: place(event), low: low}; });
    window.addEventListener("mouseup", function () { from = null; });
    svg.addEventListener("mousemove", function (event) {
      if (from) { show(from.low - (place(event) - from.share) * (high - low), high - low); }
    });
    svg.addEventListener("dblclick", function () { show(0, end); });
  });
})();
"""
