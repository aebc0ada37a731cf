// Elements without markup: every text goes in as text, so that no name can become anything else.

export const byId = (id) => document.getElementById(id);

/** An element with a class, attributes and children (text or elements). */
export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** Set the text only when it differs: an unchanged node costs nothing and keeps a selection. */
export function say(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

export function mark(element, name, value) {
  const wanted = String(value);
  if (element.dataset[name] !== wanted) element.dataset[name] = wanted;
}

/** Make the children of `parent` follow `items`: kept by key, so that focus and transitions survive an update. */
export function follow(parent, items, keyOf, create, update) {
  const known = new Map();
  for (const child of parent.children) known.set(child.key, child);
  let place = parent.firstElementChild;
  items.forEach((item, index) => {
    const key = keyOf(item, index);
    let element = known.get(key);
    if (element) known.delete(key);
    else {
      element = create(item);
      element.key = key;
    }
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
    update(element, item);
  });
  for (const element of known.values()) element.remove();
}

/** What a panel says while it has nothing to show; `parts` alternate text and code. */
export function empty(...parts) {
  const line = make("p", "empty");
  parts.forEach((part, index) => line.append(index % 2 ? make("code", "", part) : part));
  return line;
}
