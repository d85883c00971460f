// Elements from data. Texts become text nodes, never HTML: whatever a name contains is shown as it is.

export const byId = (id) => document.getElementById(id);

/** An element; `properties` are its own (className, type, onclick, ...), `children` elements or texts. */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** A table's cell; on narrow screens it says what it is. */
export function cell(label, className = "") {
  const made = element("td", { className });
  made.dataset.label = label;
  return made;
}

/** Sets a text if it has changed: an unchanged one is neither drawn nor read out again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Replaces the children if `key` differs from the last time. */
export function setChildren(node, key, make) {
  if (node.dataset.key === key) return;
  node.dataset.key = key;
  node.replaceChildren(...make());
}

export function show(node, visible) {
  node.hidden = !visible;
}

/** A line with the result of an action. */
export function tell(node, text, bad = false) {
  node.textContent = text;
  node.classList.toggle("bad", bad);
  node.hidden = text === "";
}
