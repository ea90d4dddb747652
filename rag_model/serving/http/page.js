// The web page sends a question to /search or /answer, and shows the passages and the share of each in the answer.
// Passages, titles and questions come from outside, so they become text nodes and never markup.
"use strict";

const byId = (id) => document.getElementById(id);
const COLOURS = 5; // number of passage colours in the style sheet
let activeRequest = null; // controller of the current request; the next request aborts it
let snapshot = null; // last reply of /snapshot

function createElement(name, properties = {}, ...children) {
  const { data = {}, ...rest } = properties;
  const element = Object.assign(document.createElement(name), rest);
  Object.assign(element.dataset, data);
  element.append(...children.filter((child) => child !== null && child !== ""));
  return element;
}

const formatPercent = (share) => (share > 0 && share < 0.005 ? "<1 %" : `${Math.round(100 * share)} %`);
const chooseColour = (index) => String((index % COLOURS) + 1);

// Words ------------------------------------------------------------------------------------------------------------

// Words that nearly every passage has: marking them would not help.
const COMMON = new Set(
  ("a an and are as at be been but by can could did do does for from had has have he her his how i if in into is it its " +
    "many me much my no not of on or she so than that the their them then there these they this those to up was we were " +
    "what when where which who whom whose why will with would you your").split(" "),
);
const segmenter = globalThis.Intl?.Segmenter ? new Intl.Segmenter(undefined, { granularity: "word" }) : null;

function* splitWords(text) {
  if (segmenter) for (const piece of segmenter.segment(text)) yield [piece.segment, piece.isWordLike];
  else for (const piece of text.split(/([\p{L}\p{N}]+)/u)) yield [piece, /[\p{L}\p{N}]/u.test(piece)];
}

const foldWord = (word) => word.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();

function extractWords(question) {
  const words = [...splitWords(question)].filter(([, isWord]) => isWord).map(([word]) => foldWord(word));
  const rare = words.filter((word) => !COMMON.has(word));
  return rare.length ? rare : words;
}

// "mountains" matches "mountain": the longer word starts with the shorter one and has at most two letters more.
function areSimilar(first, second) {
  const [short, long] = first.length < second.length ? [first, second] : [second, first];
  return short === long || (short.length >= 4 && long.length - short.length <= 2 && long.startsWith(short));
}

function markWords(text, words) {
  const fragment = document.createDocumentFragment();
  let plain = "";
  for (const [piece, isWord] of splitWords(text)) {
    if (isWord && words.some((word) => areSimilar(word, foldWord(piece)))) {
      fragment.append(plain, createElement("mark", { textContent: piece }));
      plain = "";
    } else plain += piece;
  }
  fragment.append(plain);
  return fragment;
}

// Links ------------------------------------------------------------------------------------------------------------

function createLink(address, ...children) {
  let url = null;
  try {
    url = new URL(address);
  } catch {
    // An invalid address: show the text without a link.
  }
  if (!url || !["http:", "https:"].includes(url.protocol)) return createElement("span", {}, ...children);
  return createElement("a", { href: url.href, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

// A licence line contains "words (address)": the words become a link to the address.
function createCredit(line) {
  const paragraph = createElement("p", { className: "credit" });
  let end = 0;
  for (const match of line.matchAll(/(“[^”]*”|[^,;()“”]+) \((https?:\/\/[^\s()]+)\)/gu)) {
    const words = match[1].trimStart();
    paragraph.append(line.slice(end, match.index), match[1].slice(0, match[1].length - words.length), createLink(match[2], words));
    end = match.index + match[0].length;
  }
  paragraph.append(line.slice(end));
  return paragraph;
}

const formatDay = (time) => (time ?? "").split("T")[0];
const createRevision = (time) => createElement("time", { dateTime: time, title: `revised ${time}`, textContent: formatDay(time) });

// Passages and answers --------------------------------------------------------------------------------------------

function createPassage(hit, index, words) {
  const heading = createElement("h2", {}, createLink(hit.url ?? "", hit.title || "Untitled"));
  if (hit.section) heading.append(createElement("span", { className: "soft", textContent: ` § ${hit.section}` }));
  if (hit.revised) heading.append(createElement("span", { className: "soft" }, ", ", createRevision(hit.revised)));
  const card = createElement("li", { className: "passage" });
  card.append(createElement("span", { className: "rank", textContent: String(index + 1), title: `score ${hit.score.toFixed(3)}` }), heading);
  card.append(createElement("p", { className: "text" }, markWords(hit.text, words)));
  if (Number.isFinite(hit.posterior)) {
    card.dataset.colour = chooseColour(index);
    card.append(createElement("div", { className: "shares" }, createMeter("found", hit.weight), createMeter("carries", hit.posterior)));
  }
  card.append(hit.licence ? createCredit(hit.licence) : "");
  return card;
}

const METER_LABELS = {
  found: ["retrieved", "p(z|x): the weight of this passage in retrieval, before the answer"],
  carries: ["in the answer", "p(z|x,y): how much of the answer this passage carries"],
};

function createMeter(kind, share) {
  const [label, explanation] = METER_LABELS[kind];
  const bar = createElement("span", { className: "track" }, createElement("span", { className: "fill" }));
  bar.firstChild.style.setProperty("--share", share);
  return createElement("div", { className: `meter ${kind}`, title: explanation }, `${label} `, bar, createElement("b", { textContent: formatPercent(share) }));
}

function createAnswer(answer) {
  const passages = answer.passages;
  const text = createElement("p", { className: "said" });
  const note = createElement("p", { className: "soft token-note", role: "status" });
  const tokens = (answer.tokens ?? []).filter((token) => token.text);
  if (!answer.answer) text.append(createElement("span", { className: "soft", textContent: answer.abstained ? "The library does not contain the answer." : `The model gave no answer${answer.problem ? `: ${answer.problem.message}` : ""}.` }));
  else if (tokens.length) text.append(...tokens.map((token, index) => createToken(token, index, note)));
  else text.append(...createCitedText(answer));
  if (answer.ended === false) text.append(createElement("span", { className: "soft", textContent: " …", title: "cut: it is too long" }));
  const hasShares = passages.length > 0 && passages.every((passage) => Number.isFinite(passage.posterior)); // the model marginalises
  const bar = createElement("div", { className: "parts", role: "img" });
  const shares = passages.map((passage, index) => ({ index, title: passage.title, share: passage.posterior }));
  bar.ariaLabel = shares.map(({ index, title, share }) => `passage ${index + 1}, ${title}: ${formatPercent(share)}`).join("; ");
  for (const { index, title, share } of shares) {
    const part = createElement("span", { data: { colour: chooseColour(index) }, title: `${index + 1}. ${title}: ${formatPercent(share)} of the answer` });
    part.style.setProperty("--share", share);
    bar.append(part);
  }
  if (tokens.length > 1) text.addEventListener("keydown", moveBetweenTokens);
  return [text, hasShares ? bar : "", tokens.length ? note : ""];
}

// Link the citations of an answer to the revisions of their articles; other brackets stay text.
function createCitedText(answer) {
  const citations = new Set(answer.citations ?? []);
  return answer.answer.split(/(\[[\d\s,;\u2013-]+\])/).flatMap((piece, index) => {
    if (index % 2 === 0 || !piece.match(/\d+/g)?.some((number) => citations.has(Number(number)))) return piece ? [piece] : [];
    return piece.split(/(\d+)/).map((part) => {
      const entry = citations.has(Number(part)) && part.trim() ? answer.context[Number(part) - 1] : undefined;
      if (!entry) return part;
      const citation = createLink(entry.url, part);
      citation.title = [entry.title, entry.section && `§ ${entry.section}`, formatDay(entry.revised)].filter(Boolean).join(", ");
      return citation;
    });
  });
}

// A token of RAG-Token's answer has the colour of the passage with the largest share; arrow keys move between tokens.
function createToken(token, position, note) {
  const order = token.posterior.map((share, index) => [share, index]).sort((first, second) => second[0] - first[0]);
  const element = createElement("span", { className: "token", textContent: token.text, tabIndex: position ? -1 : 0 });
  if (order.length) element.dataset.colour = chooseColour(order[0][1]);
  const shares = order.slice(0, 3).map(([share, index]) => `${formatPercent(share)} passage ${index + 1}`).join(", ");
  const showShares = () => (note.textContent = `“${token.text.trim()}”: ${shares}`);
  element.addEventListener("mouseenter", showShares);
  element.addEventListener("focus", showShares);
  return element;
}

function moveBetweenTokens(event) {
  const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  const next = step && event.target[step];
  if (!next?.classList.contains("token")) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

// Requests ---------------------------------------------------------------------------------------------------------

const STATUS_SENTENCES = {
  400: "The question is not valid.",
  413: "The question is too long.",
  422: "The question is not valid.",
  429: "Too many questions are waiting. Try again in a moment.",
  502: "The model is not available. Try again in a moment.",
  503: "The library is not ready to answer. Try again in a moment.",
  504: "That took too long. Try again in a moment.",
};

async function readError(reply) {
  let message = "";
  try {
    const body = await reply.json();
    const detail = body.error?.message ?? body.error ?? body.detail ?? "";
    message = Array.isArray(detail) ? detail.map((error) => error.msg).join("; ") : String(detail);
  } catch {
    // The reply is no JSON: the sentence of the status is enough.
  }
  return describeError(reply.status, message);
}

function describeError(status, detail) {
  const sentence = STATUS_SENTENCES[status] ?? `The service failed (${status}).`;
  return detail ? `${sentence} (${detail})` : sentence;
}

// A browser that cannot read a reply in pieces requests the whole reply.
const CAN_STREAM = typeof TextDecoder === "function" && "body" in Response.prototype;
const EVENTS = "text/event-stream";

async function* readEvents(reply) {
  const reader = reply.body.getReader();
  const decoder = new TextDecoder();
  let incompleteEvent = "";
  for (let hasEnded = false; !hasEnded; ) {
    const { value, done } = await reader.read();
    hasEnded = done;
    incompleteEvent += done ? decoder.decode() : decoder.decode(value, { stream: true });
    const events = incompleteEvent.split("\n\n");
    incompleteEvent = events.pop();
    for (const event of events) {
      const [name, data] = event.split("\n").map((line) => line.slice(line.indexOf(": ") + 2));
      yield [name, JSON.parse(data)];
    }
  }
}

// Show passages and words as they arrive, and return the whole reply.
async function streamAnswer(reply, words) {
  const text = createElement("p", { className: "said growing" });
  for await (const [name, value] of readEvents(reply)) {
    if (name === "passages") {
      text.textContent = "";
      const hits = value.answers[0].passages;
      render({ status: "Reading…", passages: hits.map((hit, index) => createPassage(hit, index, words)) });
    } else if (name === "text") {
      text.append(value.text);
      if (!text.isConnected) byId("answer").replaceChildren(text);
      byId("answer").hidden = false;
    } else if (name === "answer") return value;
    else if (name === "error") throw new Error(describeError(value.status, value.detail));
  }
  throw new Error("The answer was interrupted. Ask again.");
}

async function sendQuestion(verb, question, k, retriever, kind, signal) {
  const headers = { "Content-Type": "application/json" };
  if (verb === "answer" && CAN_STREAM) headers.Accept = `${EVENTS}, application/json`;
  k = Math.min(k, snapshot?.passages ?? k); // a small snapshot has fewer passages
  const body = { questions: [question], k, retriever };
  if (kind && verb === "search") body.where = `kind=${kind}`;
  else if (kind) body.retriever = `where(${retriever ? `${retriever}, ` : ""}kind=${kind})`;
  const reply = await fetch(verb, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!reply.ok) throw new Error(await readError(reply));
  return (reply.headers.get("Content-Type") ?? "").startsWith(EVENTS) ? streamAnswer(reply, extractWords(question)) : reply.json();
}

function render({ status = "", error = "", answer = [], passages = [] }) {
  byId("status").textContent = status;
  byId("error").textContent = error;
  byId("error").hidden = !error;
  byId("answer").replaceChildren(...answer);
  byId("answer").hidden = !answer.length;
  byId("passages").replaceChildren(...passages);
}

async function askQuestion(question, k, verb, retriever, kind) {
  activeRequest?.abort();
  const request = (activeRequest = new AbortController());
  document.body.classList.add("asked");
  document.body.ariaBusy = "true";
  document.title = `${question} · bookwheel`;
  render({ status: verb === "answer" ? "Reading…" : "Looking…" });
  const startTime = performance.now();
  try {
    const reply = await sendQuestion(verb, question, k, retriever, kind, request.signal);
    const duration = `${((performance.now() - startTime) / 1000).toFixed(2)} s`;
    const result = reply.answers?.[0] ?? reply.results[0];
    const hits = result.passages ?? result.hits;
    const words = extractWords(question);
    const fromWeights = result.memory === "weights" ? `From the model's weights, without passages, in ${duration}` : "";
    const status = fromWeights || (hits.length ? `${hits.length} passages in ${duration}` : "Nothing was found.");
    render({ status, answer: reply.answers ? createAnswer(result) : [], passages: hits.map((hit, index) => createPassage(hit, index, words)) });
    if (reply.snapshot !== snapshot?.snapshot) await loadSnapshot();
  } catch (error) {
    if (error.name === "AbortError") return;
    render({ error: error instanceof TypeError ? "The service cannot be reached. Is it still running?" : error.message });
  } finally {
    if (activeRequest === request) document.body.ariaBusy = "false";
  }
}

// The fragment of the address holds the question, so that a user can bookmark and share it. Browsers never send fragments.
function askFromAddress() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const question = (parameters.get("q") ?? "").trim();
  if (!question) return;
  byId("question").value = question;
  if ([...byId("k").options].some((option) => option.value === parameters.get("k"))) byId("k").value = parameters.get("k");
  const retrievers = selectOption("retriever", parameters.get("by"));
  const kinds = selectOption("kind", parameters.get("kind"));
  showExplanation();
  const verb = snapshot?.model && parameters.get("show") !== "passages" ? "answer" : "search";
  for (const choice of document.querySelectorAll("[name=verb]")) choice.checked = choice.value === verb;
  askQuestion(question, Number(byId("k").value), verb, retrievers.value || null, kinds.value);
}

// Select the option with a value, or the first option if there is none.
function selectOption(id, value) {
  const list = byId(id);
  if ([...list.options].some((option) => option.value === value)) list.value = value;
  else list.selectedIndex = list.options.length ? 0 : -1;
  return list;
}

function showExplanation() {
  const line = snapshot?.explanations?.[byId("retriever").selectedIndex] ?? "";
  byId("explanation").textContent = line;
  byId("explanation").hidden = !line || byId("by").hidden;
}

function submit(event) {
  event?.preventDefault();
  const question = byId("question").value.trim();
  if (!question) return byId("question").focus();
  const parameters = new URLSearchParams({ q: question, k: byId("k").value });
  if (byId("retriever").selectedIndex > 0) parameters.set("by", byId("retriever").value); // the first is the default
  if (byId("kind").value) parameters.set("kind", byId("kind").value);
  if (document.querySelector("[name=verb]:checked").value === "search") parameters.set("show", "passages");
  if (location.hash.slice(1) === parameters.toString()) askFromAddress();
  else location.hash = parameters;
}

// The foot ---------------------------------------------------------------------------------------------------------

function formatAge(time) {
  const seconds = (Date.now() - Date.parse(time)) / 1000;
  for (const [unit, size] of [["year", 31556952], ["month", 2629746], ["day", 86400], ["hour", 3600], ["minute", 60]]) {
    if (seconds >= size) return new Intl.RelativeTimeFormat("en", { numeric: "auto" }).format(-Math.floor(seconds / size), unit);
  }
  return "just now";
}

// Offer the retrievers of the current snapshot; a choice that is still offered is kept.
function offerRetrievers(names) {
  const retrievers = byId("retriever");
  const previousValue = retrievers.value;
  retrievers.replaceChildren(...names.map((name) => createElement("option", { value: name, textContent: name })));
  if (names.includes(previousValue)) retrievers.value = previousValue;
  byId("by").hidden = names.length < 2;
  showExplanation();
}

function offerKinds(names) {
  const previousValue = byId("kind").value;
  const options = ["", ...names].map((name) => createElement("option", { value: name, textContent: name || "any" }));
  byId("kind").replaceChildren(...options);
  selectOption("kind", previousValue);
  byId("of").hidden = !names.length;
}

async function loadSnapshot() {
  try {
    const reply = await fetch("snapshot");
    if (!reply.ok) throw new Error(await readError(reply));
    snapshot = await reply.json();
  } catch (error) {
    byId("foot").textContent = error instanceof TypeError ? "The service cannot be reached." : error.message;
    return;
  }
  const { snapshot: id, ref, number, created_at: time, model, passages, refused } = snapshot;
  byId("verbs").hidden = !model;
  offerRetrievers(snapshot.retrievers ?? []);
  offerKinds(snapshot.kinds ?? []);
  if (passages) byId("about").textContent = `${passages.toLocaleString("en")} passages, open to your question.`;
  const parts = [`snapshot `, createElement("code", { textContent: id.slice(0, 12), title: id })];
  if (number) parts.push(` · ${ref}@${number}`);
  if (Number.isFinite(Date.parse(time))) parts.push(" · ", createElement("time", { dateTime: time, title: time, textContent: formatAge(time) }));
  if (model) parts.push(" · model ", createElement("code", { textContent: String(model).split("/").pop().slice(0, 12), title: model }));
  if (refused) parts.push(" · ", createElement("span", { className: "bad", textContent: "a newer one was refused", title: refused.reason }));
  byId("foot").replaceChildren(...parts);
}

byId("ask").addEventListener("submit", submit);
byId("k").addEventListener("change", () => byId("question").value.trim() && submit());
byId("retriever").addEventListener("change", showExplanation);
byId("retriever").addEventListener("change", () => byId("question").value.trim() && submit());
byId("kind").addEventListener("change", () => byId("question").value.trim() && submit());
byId("verbs").addEventListener("change", () => byId("question").value.trim() && submit());
addEventListener("hashchange", askFromAddress);
addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target === byId("question")) return;
  event.preventDefault();
  byId("question").select();
});
loadSnapshot().then(askFromAddress);
