// Draws the passages of one token view as they are scrolled to. All data is in the block's own JSON.
(async function (root) {
  if (!root || root.dataset.drawn) return;
  root.dataset.drawn = "1";
  const reason = root.querySelector(".static .reason");
  if (!window.DecompressionStream) {
    reason.textContent = "This browser can't unpack the answers (DecompressionStream): these are the worst passages.";
    return;
  }
  reason.textContent = "Unpacking the answers …";
  const packed = root.querySelector("script[type='text/plain']");
  const bytes = Uint8Array.from(atob(packed.textContent.trim()), (c) => c.charCodeAt(0));
  packed.remove();
  const D = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  const list = root.querySelector(".list"), tip = root.querySelector(".tip"), said = root.querySelector(".said");
  const more = root.querySelector(".more"), order = root.querySelector(".order"), set = root.querySelector(".set");
  const PAGE = 20, PAGE_TOKENS = 2000, NEAR = 12;
  let wanted = "", queue = [], shown = 0;

  const make = (tag, cls, text) => {
    const e = document.createElement(tag);
    if (cls) e.className = cls;
    if (text !== undefined) e.textContent = text;
    return e;
  };
  const percent = (m) => (m < 1 ? "< 0.1 %" : (m / 10).toFixed(1) + " %");
  const visible = (w) => w.replace(/\n/g, "↵\n").replace(/\t/g, "⇥") || "∅";
  const kind = (a, i) => D.kinds[a.k.charCodeAt(i) - 97];
  const roundOf = (a, i) => { // the last round that starts before token i
    let low = 0, high = a.r.length;
    while (low < high) { const mid = (low + high) >> 1; if (a.r[mid][0] < i) low = mid + 1; else high = mid; }
    return low - 1;
  };
  const parted = (a, i) => { const r = roundOf(a, i); return r >= 0 && a.r[r][3] === 1; };
  const hits = (a, i) => (wanted === "parted" ? parted(a, i) : kind(a, i) === wanted);

  function token(a, i, near) {
    const e = make("span", "t " + (near ? "near" : kind(a, i)), visible(D.words[a.t[i]]));
    e.dataset.i = i;
    if (near) return e;
    const r = roundOf(a, i);
    e.tabIndex = -1;
    if (kind(a, i) === "accepted") e.style.setProperty("--a", Math.min(0.16 + 0.13 * (i - a.r[r][0]), 0.68));
    if (parted(a, i)) e.classList.add("parted");
    if (wanted && hits(a, i)) e.classList.add("hit");
    return e;
  }

  function section([n, first, last, rounds, accepted]) {
    const a = D.answers[n], box = make("section");
    const tokens = make("p", "text" + (wanted ? " chosen" : ""));
    box.append(make("h4", "", a.id + " · " + a.set + " · tokens " + (first + 1) + " to " + (last + 1) + " of " + a.t.length
      + " · " + rounds + " rounds · " + (rounds ? (1 + accepted / rounds).toFixed(2) + " tokens a round" : "")
      + (a.rec ? "" : " · simulator's rounds" + (a.problem ? " (" + a.problem + ")" : ""))), tokens);
    if (first <= 1) tokens.append(make("span", "near", a.prompt + " ▸ "));
    for (let i = Math.max(0, first - NEAR); i < first; i++) tokens.append(token(a, i, i > 0 || first > 1));
    for (let i = first; i <= last; i++) tokens.append(token(a, i, false));
    if (last + 1 < a.t.length) tokens.append(make("span", "near", " …"));
    else if (a.cut) tokens.append(make("span", "near", " ▮ the answer ends within a round"));
    const start = tokens.querySelector(".t[tabindex]");
    if (start) start.tabIndex = 0;
    tokens.a = a;
    return box;
  }

  function draw() {
    let end = shown;
    for (let tokens = 0; end < queue.length && end < shown + PAGE && tokens < PAGE_TOKENS; end++) tokens += queue[end][2] - queue[end][1];
    const part = queue.slice(shown, end);
    list.append(...part.map(section));
    shown += part.length;
    more.hidden = shown >= queue.length;
    said.textContent = shown.toLocaleString("en") + " of " + queue.length.toLocaleString("en") + " passages are drawn";
  }

  function inTurns(sorted) { // each answer's first, then each one's second, and so on
    const seen = new Map(), turn = new Map();
    for (const p of sorted) { turn.set(p, seen.get(p[0]) || 0); seen.set(p[0], turn.get(p) + 1); }
    return sorted.sort((a, b) => turn.get(a) - turn.get(b));
  }

  function restart() {
    tip.hidden = true;
    const whole = order.value === "answers";
    const all = whole ? D.answers.map((a, n) => [n, Math.min(1, a.t.length - 1), a.t.length - 1, a.r.length, a.accepted]) : D.passages;
    queue = all.filter((p) => !set.value || D.answers[p[0]].set === set.value);
    // Sorting is stable: what is equal keeps the order of the turns.
    if (order.value === "strict") queue.sort((a, b) => a[4] / a[3] - b[4] / b[3]);
    if (wanted) {
      const count = new Map(queue.map((p) => {
        let c = 0;
        for (let i = p[1] === 1 ? 0 : p[1]; i <= p[2]; i++) c += hits(D.answers[p[0]], i);
        return [p, c];
      }));
      queue = queue.filter((p) => count.get(p));
      if (!whole) queue.sort((a, b) => count.get(b) - count.get(a));
      if (order.value === "passages") inTurns(queue);
    }
    list.replaceChildren();
    shown = 0;
    draw();
  }

  function table(head, flat, own, place) {
    const t = make("table"), row = make("tr");
    row.append(make("th", "", head), make("th", "", ""));
    t.append(row);
    for (let j = 0; j < flat.length; j += 2) {
      const line = make("tr", flat[j] === own ? "hit" : "");
      line.append(make("td", "", JSON.stringify(D.words[flat[j]])), make("td", "n", percent(flat[j + 1])));
      t.append(line);
    }
    place.append(t);
  }

  function tell(e) {
    const a = e.parentElement.a, i = +e.dataset.i, own = a.t[i], r = a.r[roundOf(a, i)];
    const step = r && i - r[0] <= r[2] ? i - r[0] : 0;
    tip.replaceChildren(make("div", "", JSON.stringify(D.words[own]) + " (id " + D.ids[own] + "), " + D.told[kind(a, i)]
      + (step ? ", draft step " + step : "")));
    tip.append(make("div", "", (D.inside[own] === "1" ? "in" : "outside") + " the draft vocabulary; target "
      + percent(a.qp[i]) + (a.dp[i] === null ? "" : ", drafter " + percent(a.dp[i]))));
    if (a.d[i].length) table("drafter", a.d[i], own, tip);
    table("target", a.q[i], own, tip);
    if (r) tip.append(make("div", "", "round from token " + (r[0] + 1) + ": accepted " + r[1] + " of " + r[2]
      + (a.rec ? ", simulator " + r[4] + (r[3] === 1 ? " (they differ)" : r[3] === 2 ? " (ends with the answer, not compared)" : "") : "")
      + "; RMS of the target's states there " + r[5].join(", ") + " (" + D.slots + ")"));
    if (r && r[6].length) {
      const steps = make("div", "", "RMS of the drafter's states by step: ");
      r[6].forEach((x, k) => steps.append(k ? ", " : "", make(k + 1 === step ? "b" : "span", "", String(x))));
      tip.append(steps);
    }
    tip.hidden = false;
    const at = e.getBoundingClientRect(), size = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(at.left, innerWidth - size.width - 8)) + "px";
    const below = at.bottom + 6;
    tip.style.top = (below + size.height < innerHeight ? below : Math.max(4, at.top - size.height - 6)) + "px";
  }

  const tokenOf = (event) => event.target.closest && event.target.closest(".list .t[tabindex]");
  list.addEventListener("mouseover", (event) => { const e = tokenOf(event); if (e) tell(e); else tip.hidden = true; });
  list.addEventListener("mouseleave", () => { tip.hidden = true; });
  list.addEventListener("focusin", (event) => { const e = tokenOf(event); if (e) tell(e); });
  list.addEventListener("focusout", () => { tip.hidden = true; });
  list.addEventListener("keydown", (event) => {
    const e = tokenOf(event);
    if (!e) return;
    if (event.key === "Escape") { tip.hidden = true; return; }
    const mine = [...e.parentElement.querySelectorAll(".t[tabindex]")], at = mine.indexOf(e);
    const beside = (by) => {
      const texts = [...list.querySelectorAll(".text")], next = texts[texts.indexOf(e.parentElement) + by];
      return next && next.querySelector(".t[tabindex='0']");
    };
    const to = { ArrowRight: mine[at + 1], ArrowLeft: mine[at - 1], Home: mine[0], End: mine[mine.length - 1],
      ArrowDown: beside(1), ArrowUp: beside(-1) }[event.key];
    if (!to) return;
    event.preventDefault();
    event.stopPropagation();
    if (to.parentElement === e.parentElement) { e.tabIndex = -1; to.tabIndex = 0; }
    to.focus();
  });
  root.querySelectorAll("button[data-kind]").forEach((button) => {
    button.disabled = false;
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      wanted = wanted === button.dataset.kind ? "" : button.dataset.kind;
      root.querySelectorAll("button[data-kind]").forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.kind === wanted)));
      restart();
    });
  });
  order.addEventListener("change", restart);
  set.addEventListener("change", restart);
  more.addEventListener("click", draw);
  if (window.IntersectionObserver) new IntersectionObserver((seen) => { if (seen[0].isIntersecting && !more.hidden) draw(); },
    { rootMargin: "600px" }).observe(more);
  root.querySelector(".static").remove();
  root.querySelector(".tools").hidden = false;
  restart();
})(document.getElementById("TOKEN_VIEW_ID"));
