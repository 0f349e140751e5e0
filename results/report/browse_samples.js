// Browses the samples of the page's data: choose, filter, sort. Texts of a run enter the page by textContent alone.
(() => {
  const panels = JSON.parse(document.getElementById("sample-data").textContent);
  const form = document.getElementById("sample-form");
  const list = document.getElementById("sample-list");
  const count = document.getElementById("sample-count");
  const more = document.getElementById("sample-more");
  const STEP = 10;
  let limit = STEP;

  function element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined && text !== null) made.textContent = text;
    return made;
  }

  const ORDERS = {
    joules: (a, b) => (b.joules ?? -1) - (a.joules ?? -1) || b.seconds - a.seconds,
    seconds: (a, b) => b.seconds - a.seconds,
    disagreement: (a, b) => b.disagreement - a.disagreement || b.seconds - a.seconds,
    asked: (a, b) => a.position - b.position,
  };
  const FILTERS = {
    all: () => true,
    verdicts: (s) => s.verdictsDiffer,
    answers: (s) => s.answersDiffer,
    wrong: (s) => s.answers.some((a) => a.wrong),
  };

  function holds(sample, words) {
    if (!words) return true;
    const texts = [sample.id, sample.question, sample.expected ?? "", ...sample.answers.map((a) => a.said)];
    return texts.some((text) => text.toLowerCase().includes(words));
  }

  function labelled(label, text) {
    const line = element("p", "sample-line");
    line.append(element("span", "tag", label), element("span", "sample-text", text));
    return line;
  }

  function answerRow(answer) {
    const row = element("tr");
    const name = element("th");
    name.scope = "row";
    name.append(answer.name);
    const said = element("td", "sample-text", answer.said);
    if (answer.varies) said.append(element("span", "tag", "repeats differ; this is the first"));
    const score = element("td");
    for (const [metric, verdict] of answer.scores) {
      const shown = element("span", verdict === "wrong" ? "verdict wrong" : "verdict", verdict);
      shown.append(element("span", "tag", metric));
      score.append(shown);
    }
    const joules = element("td", answer.joules ? "number" : "number missing", answer.joules ?? "not resolved");
    if (answer.why) joules.append(element("span", "tag", answer.why));
    row.append(name, said, score, element("td", "number", answer.tokens), joules, element("td", "number", answer.time));
    return row;
  }

  function sampleItem(sample) {
    const item = element("li", "sample");
    item.append(element("h3", "id", sample.id));
    item.append(labelled("asked", sample.question));
    if (sample.choices.length) {
      const choices = element("ol", "sample-choices");
      for (const choice of sample.choices) choices.append(element("li", "sample-text", choice));
      item.append(choices);
    }
    if (sample.expected !== null) item.append(labelled("expected", sample.expected));
    const table = element("table");
    const head = element("tr");
    for (const [title, className] of [
      ["Arm", ""], ["Said", ""], ["Score", ""], ["Tokens in + out", "number"], ["Joules", "number"], ["Time", "number"],
    ]) {
      const cell = element("th", className, title);
      cell.scope = "col";
      head.append(cell);
    }
    const thead = element("thead");
    thead.append(head);
    const body = element("tbody");
    body.append(...sample.answers.map(answerRow));
    table.append(thead, body);
    const scroll = element("div", "scroll");
    scroll.tabIndex = 0;
    scroll.append(table);
    item.append(scroll);
    return item;
  }

  function show() {
    const panel = panels[Number(form.elements.panel.value)];
    const words = form.elements.words.value.trim().toLowerCase();
    const found = panel.samples.filter((s) => FILTERS[form.elements.filter.value](s) && holds(s, words));
    found.sort(ORDERS[form.elements.order.value]);
    list.replaceChildren(...found.slice(0, limit).map(sampleItem));
    const kept = panel.samples.length < panel.total
      ? `This page holds ${panel.samples.length} of ${panel.total} samples: the dearest, and those on which the arms ` +
        "disagree most. All are in samples.csv."
      : `All ${panel.total} samples.`;
    const seen = Math.min(limit, found.length);
    count.textContent = `${kept} ${found.length} match, ${seen} shown. ${panel.how}.`;
    more.hidden = found.length <= limit;
  }

  panels.forEach((panel, i) => {
    const option = element("option", "", panel.title);
    option.value = String(i);
    form.elements.panel.append(option);
  });
  form.addEventListener("input", () => { limit = STEP; show(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", () => { limit += STEP; show(); });
  form.hidden = false;
  show();
})();
