// The web page: asks /search or /answer, shows what was found and how much of the answer each passage carries.
// Whatever comes from outside (passages, titles, questions) becomes text nodes, never markup.
"use strict";

const byId = (id) => document.getElementById(id);
const COLOURS = 5; // of passages in the sheet
let asking = null; // the request under way, which a newer one ends
let snapshot = null; // what /snapshot said last

function make(name, properties = {}, ...children) {
  const { data = {}, ...rest } = properties;
  const element = Object.assign(document.createElement(name), rest);
  Object.assign(element.dataset, data);
  element.append(...children.filter((child) => child !== null && child !== ""));
  return element;
}

const percent = (share) => (share > 0 && share < 0.005 ? "<1 %" : `${Math.round(100 * share)} %`);
const colour = (place) => String((place % COLOURS) + 1);

// Words ------------------------------------------------------------------------------------------------------------

// Words of every passage, which are not worth marking.
const COMMON = new Set(
  ("a an and are as at be been but by can could did do does for from had has have he her his how i if in into is it its " +
    "many me much my no not of on or she so than that the their them then there these they this those to up was we were " +
    "what when where which who whom whose why will with would you your").split(" "),
);
const segmenter = globalThis.Intl?.Segmenter ? new Intl.Segmenter(undefined, { granularity: "word" }) : null;

function* pieces(text) {
  if (segmenter) for (const piece of segmenter.segment(text)) yield [piece.segment, piece.isWordLike];
  else for (const piece of text.split(/([\p{L}\p{N}]+)/u)) yield [piece, /[\p{L}\p{N}]/u.test(piece)];
}

const fold = (word) => word.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();

function wordsOf(question) {
  const words = [...pieces(question)].filter(([, isWord]) => isWord).map(([word]) => fold(word));
  const rare = words.filter((word) => !COMMON.has(word));
  return rare.length ? rare : words;
}

// "mountains" is "mountain": the longer begins with the shorter, and little follows.
function alike(one, other) {
  const [short, long] = one.length < other.length ? [one, other] : [other, one];
  return short === long || (short.length >= 4 && long.length - short.length <= 2 && long.startsWith(short));
}

function marked(text, words) {
  const shown = document.createDocumentFragment();
  let plain = "";
  for (const [piece, isWord] of pieces(text)) {
    if (isWord && words.some((word) => alike(word, fold(piece)))) {
      shown.append(plain, make("mark", { textContent: piece }));
      plain = "";
    } else plain += piece;
  }
  shown.append(plain);
  return shown;
}

// Links ------------------------------------------------------------------------------------------------------------

function link(address, ...children) {
  let url = null;
  try {
    url = new URL(address);
  } catch {
    // no address: the text alone
  }
  if (!url || !["http:", "https:"].includes(url.protocol)) return make("span", {}, ...children);
  return make("a", { href: url.href, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

// A line of credit has "words (address)"; the words become the link.
function credit(line) {
  const shown = make("p", { className: "credit" });
  let end = 0;
  for (const found of line.matchAll(/(“[^”]*”|[^,;()“”]+) \((https?:\/\/[^\s()]+)\)/gu)) {
    const words = found[1].trimStart();
    shown.append(line.slice(end, found.index), found[1].slice(0, found[1].length - words.length), link(found[2], words));
    end = found.index + found[0].length;
  }
  shown.append(line.slice(end));
  return shown;
}

const day = (time) => (time ?? "").split("T")[0];
const revision = (time) => make("time", { dateTime: time, title: `revised ${time}`, textContent: day(time) });

// What was found ---------------------------------------------------------------------------------------------------

function passage(hit, place, words) {
  const heading = make("h2", {}, link(hit.url ?? "", hit.title || "Untitled"));
  if (hit.section) heading.append(make("span", { className: "soft", textContent: ` § ${hit.section}` }));
  if (hit.revised) heading.append(make("span", { className: "soft" }, ", ", revision(hit.revised)));
  const card = make("li", { className: "passage" });
  card.append(make("span", { className: "rank", textContent: String(place + 1), title: `score ${hit.score.toFixed(3)}` }), heading);
  card.append(make("p", { className: "text" }, marked(hit.text, words)));
  if (Number.isFinite(hit.posterior)) {
    card.dataset.colour = colour(place);
    card.append(make("div", { className: "shares" }, meter("found", hit.weight), meter("carries", hit.posterior)));
  }
  card.append(hit.licence ? credit(hit.licence) : "");
  return card;
}

const MEANING = {
  found: ["retrieved", "p(z|x): the weight of this passage in retrieval, before the answer"],
  carries: ["in the answer", "p(z|x,y): how much of the answer this passage carries"],
};

function meter(kind, share) {
  const [words, meaning] = MEANING[kind];
  const bar = make("span", { className: "track" }, make("span", { className: "fill" }));
  bar.firstChild.style.setProperty("--share", share);
  return make("div", { className: `meter ${kind}`, title: meaning }, `${words} `, bar, make("b", { textContent: percent(share) }));
}

function said(answer) {
  const passages = answer.passages;
  const text = make("p", { className: "said" });
  const note = make("p", { className: "soft token-note", role: "status" });
  const tokens = (answer.tokens ?? []).filter((token) => token.text);
  if (!answer.answer) text.append(make("span", { className: "soft", textContent: answer.abstained ? "The library does not hold it." : `The model gave no answer${answer.problem ? `: ${answer.problem.message}` : ""}.` }));
  else if (tokens.length) text.append(...tokens.map((token, place) => spoken(token, place, note)));
  else text.append(...cited(answer));
  if (answer.ended === false) text.append(make("span", { className: "soft", textContent: " …", title: "cut: it is too long" }));
  const shared = passages.length > 0 && passages.every((one) => Number.isFinite(one.posterior)); // marginalised
  const bar = make("div", { className: "parts", role: "img" });
  const shares = passages.map((one, place) => ({ place, title: one.title, share: one.posterior }));
  bar.ariaLabel = shares.map(({ place, title, share }) => `passage ${place + 1}, ${title}: ${percent(share)}`).join("; ");
  for (const { place, title, share } of shares) {
    const part = make("span", { data: { colour: colour(place) }, title: `${place + 1}. ${title}: ${percent(share)} of the answer` });
    part.style.setProperty("--share", share);
    bar.append(part);
  }
  if (tokens.length > 1) text.addEventListener("keydown", walk);
  return [text, shared ? bar : "", tokens.length ? note : ""];
}

// An answer whose citations lead to the article's revision that they name; other brackets stay text.
function cited(answer) {
  const known = new Set(answer.citations ?? []);
  return answer.answer.split(/(\[[\d\s,;\u2013-]+\])/).flatMap((piece, place) => {
    if (place % 2 === 0 || !piece.match(/\d+/g)?.some((number) => known.has(Number(number)))) return piece ? [piece] : [];
    return piece.split(/(\d+)/).map((part) => {
      const entry = known.has(Number(part)) && part.trim() ? answer.context[Number(part) - 1] : undefined;
      if (!entry) return part;
      const shown = link(entry.url, part);
      shown.title = [entry.title, entry.section && `§ ${entry.section}`, day(entry.revised)].filter(Boolean).join(", ");
      return shown;
    });
  });
}

// A token of RAG-Token's answer: in the colour of the passage that carries it most; the arrow keys go from one to the next.
function spoken(token, place, note) {
  const order = token.posterior.map((share, at) => [share, at]).sort((one, other) => other[0] - one[0]);
  const shown = make("span", { className: "token", textContent: token.text, tabIndex: place ? -1 : 0 });
  if (order.length) shown.dataset.colour = colour(order[0][1]);
  const shares = order.slice(0, 3).map(([share, at]) => `${percent(share)} passage ${at + 1}`).join(", ");
  const tell = () => (note.textContent = `“${token.text.trim()}”: ${shares}`);
  shown.addEventListener("mouseenter", tell);
  shown.addEventListener("focus", tell);
  return shown;
}

function walk(event) {
  const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  const next = step && event.target[step];
  if (!next?.classList.contains("token")) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

// Asking -----------------------------------------------------------------------------------------------------------

const HAPPENED = {
  400: "The question cannot be asked like that.",
  413: "That is too long to be a question.",
  422: "The question cannot be asked like that.",
  429: "Too many questions are waiting just now. Try again in a moment.",
  502: "The model cannot be asked just now. Try again in a moment.",
  503: "The library is not ready to answer. Try again in a moment.",
  504: "That took too long. Try again in a moment.",
};

async function problemOf(reply) {
  let said = "";
  try {
    const body = await reply.json();
    const detail = body.error?.message ?? body.error ?? body.detail ?? "";
    said = Array.isArray(detail) ? detail.map((one) => one.msg).join("; ") : String(detail);
  } catch {
    // no JSON: the status says enough
  }
  return sentence(reply.status, said);
}

function sentence(status, said) {
  const happened = HAPPENED[status] ?? `The service failed (${status}).`;
  return said ? `${happened} (${said})` : happened;
}

// A browser that cannot read a reply piece by piece gets it whole.
const STREAMS = typeof TextDecoder === "function" && "body" in Response.prototype;
const EVENTS = "text/event-stream";

async function* eventsOf(reply) {
  const reader = reply.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (let ended = false; !ended; ) {
    const { value, done } = await reader.read();
    ended = done;
    rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const [name, data] = event.split("\n").map((line) => line.slice(line.indexOf(": ") + 2));
      yield [name, JSON.parse(data)];
    }
  }
}

// Shows passages and words as they come; gives the whole reply.
async function grown(reply, words) {
  const text = make("p", { className: "said growing" });
  for await (const [name, value] of eventsOf(reply)) {
    if (name === "passages") {
      text.textContent = "";
      const hits = value.answers[0].passages;
      show({ status: "Reading…", passages: hits.map((hit, place) => passage(hit, place, words)) });
    } else if (name === "text") {
      text.append(value.text);
      if (!text.isConnected) byId("answer").replaceChildren(text);
      byId("answer").hidden = false;
    } else if (name === "answer") return value;
    else if (name === "error") throw new Error(sentence(value.status, value.detail));
  }
  throw new Error("The answer ended half-way. Ask again.");
}

async function post(verb, question, k, retriever, kind, signal) {
  const headers = { "Content-Type": "application/json" };
  if (verb === "answer" && STREAMS) headers.Accept = `${EVENTS}, application/json`;
  k = Math.min(k, snapshot?.passages ?? k); // a small library has no more
  const asked = { questions: [question], k, retriever };
  if (kind && verb === "search") asked.where = `kind=${kind}`;
  else if (kind) asked.retriever = `where(${retriever ? `${retriever}, ` : ""}kind=${kind})`;
  const reply = await fetch(verb, { method: "POST", headers, body: JSON.stringify(asked), signal });
  if (!reply.ok) throw new Error(await problemOf(reply));
  return (reply.headers.get("Content-Type") ?? "").startsWith(EVENTS) ? grown(reply, wordsOf(question)) : reply.json();
}

function show({ status = "", error = "", answer = [], passages = [] }) {
  byId("status").textContent = status;
  byId("error").textContent = error;
  byId("error").hidden = !error;
  byId("answer").replaceChildren(...answer);
  byId("answer").hidden = !answer.length;
  byId("passages").replaceChildren(...passages);
}

async function ask(question, k, verb, retriever, kind) {
  asking?.abort();
  const mine = (asking = new AbortController());
  document.body.classList.add("asked");
  document.body.ariaBusy = "true";
  document.title = `${question} · bookwheel`;
  show({ status: verb === "answer" ? "Reading…" : "Looking…" });
  const began = performance.now();
  try {
    const reply = await post(verb, question, k, retriever, kind, mine.signal);
    const took = `${((performance.now() - began) / 1000).toFixed(2)} s`;
    const found = reply.answers?.[0] ?? reply.results[0];
    const hits = found.passages ?? found.hits;
    const words = wordsOf(question);
    const fromWeights = found.memory === "weights" ? `From the model's weights, without passages, in ${took}` : "";
    const status = fromWeights || (hits.length ? `${hits.length} passages in ${took}` : "Nothing was found.");
    show({ status, answer: reply.answers ? said(found) : [], passages: hits.map((hit, place) => passage(hit, place, words)) });
    if (reply.snapshot !== snapshot?.snapshot) await look();
  } catch (problem) {
    if (problem.name === "AbortError") return;
    show({ error: problem instanceof TypeError ? "The service cannot be reached. Is it still running?" : problem.message });
  } finally {
    if (asking === mine) document.body.ariaBusy = "false";
  }
}

// The address names the question, so that it can be kept, shared and gone back to. It never leaves the browser.
function askAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const question = (wanted.get("q") ?? "").trim();
  if (!question) return;
  byId("question").value = question;
  if ([...byId("k").options].some((option) => option.value === wanted.get("k"))) byId("k").value = wanted.get("k");
  const retrievers = choose("retriever", wanted.get("by"));
  const kinds = choose("kind", wanted.get("kind"));
  explain();
  const verb = snapshot?.model && wanted.get("show") !== "passages" ? "answer" : "search";
  for (const choice of document.querySelectorAll("[name=verb]")) choice.checked = choice.value === verb;
  ask(question, Number(byId("k").value), verb, retrievers.value || null, kinds.value);
}

// Chooses an option of a list, or the first one.
function choose(list, wanted) {
  const options = byId(list);
  if ([...options.options].some((option) => option.value === wanted)) options.value = wanted;
  else options.selectedIndex = options.options.length ? 0 : -1;
  return options;
}

function explain() {
  const line = snapshot?.explanations?.[byId("retriever").selectedIndex] ?? "";
  byId("explanation").textContent = line;
  byId("explanation").hidden = !line || byId("by").hidden;
}

function submit(event) {
  event?.preventDefault();
  const question = byId("question").value.trim();
  if (!question) return byId("question").focus();
  const wanted = new URLSearchParams({ q: question, k: byId("k").value });
  if (byId("retriever").selectedIndex > 0) wanted.set("by", byId("retriever").value); // the first is the default
  if (byId("kind").value) wanted.set("kind", byId("kind").value);
  if (document.querySelector("[name=verb]:checked").value === "search") wanted.set("show", "passages");
  if (location.hash.slice(1) === wanted.toString()) askAddress();
  else location.hash = wanted;
}

// The foot ---------------------------------------------------------------------------------------------------------

function ago(time) {
  const seconds = (Date.now() - Date.parse(time)) / 1000;
  for (const [unit, size] of [["year", 31556952], ["month", 2629746], ["day", 86400], ["hour", 3600], ["minute", 60]]) {
    if (seconds >= size) return new Intl.RelativeTimeFormat("en", { numeric: "auto" }).format(-Math.floor(seconds / size), unit);
  }
  return "just now";
}

// The retrievers of the snapshot that is served now; the choice is kept if it is still offered.
function offerRetrievers(names) {
  const retrievers = byId("retriever");
  const chosen = retrievers.value;
  retrievers.replaceChildren(...names.map((name) => make("option", { value: name, textContent: name })));
  if (names.includes(chosen)) retrievers.value = chosen;
  byId("by").hidden = names.length < 2;
  explain();
}

function offerKinds(names) {
  const chosen = byId("kind").value;
  const options = ["", ...names].map((name) => make("option", { value: name, textContent: name || "any" }));
  byId("kind").replaceChildren(...options);
  choose("kind", chosen);
  byId("of").hidden = !names.length;
}

async function look() {
  try {
    const reply = await fetch("snapshot");
    if (!reply.ok) throw new Error(await problemOf(reply));
    snapshot = await reply.json();
  } catch (problem) {
    byId("foot").textContent = problem instanceof TypeError ? "The service cannot be reached." : problem.message;
    return;
  }
  const { snapshot: id, ref, number, created_at: time, model, passages, refused } = snapshot;
  byId("verbs").hidden = !model;
  offerRetrievers(snapshot.retrievers ?? []);
  offerKinds(snapshot.kinds ?? []);
  if (passages) byId("about").textContent = `${passages.toLocaleString("en")} passages, open to your question.`;
  const named = [`snapshot `, make("code", { textContent: id.slice(0, 12), title: id })];
  if (number) named.push(` · ${ref}@${number}`);
  if (Number.isFinite(Date.parse(time))) named.push(" · ", make("time", { dateTime: time, title: time, textContent: ago(time) }));
  if (model) named.push(" · model ", make("code", { textContent: String(model).split("/").pop().slice(0, 12), title: model }));
  if (refused) named.push(" · ", make("span", { className: "bad", textContent: "a newer one was refused", title: refused.reason }));
  byId("foot").replaceChildren(...named);
}

byId("ask").addEventListener("submit", submit);
byId("k").addEventListener("change", () => byId("question").value.trim() && submit());
byId("retriever").addEventListener("change", explain);
byId("retriever").addEventListener("change", () => byId("question").value.trim() && submit());
byId("kind").addEventListener("change", () => byId("question").value.trim() && submit());
byId("verbs").addEventListener("change", () => byId("question").value.trim() && submit());
addEventListener("hashchange", askAddress);
addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target === byId("question")) return;
  event.preventDefault();
  byId("question").select();
});
look().then(askAddress);
