// Creates elements. Text is always set as text, so that output of a model never becomes markup.

/**
 * Make an element.
 * @param {string} tag such as "td" or "span.soft"
 * @param {object} properties of the element; "on…" adds a listener, "data-…", "aria-…" and
 *   "role" are attributes, null leaves one out
 * @param {...(Node|string|number|null|Array)} children
 */
export function element(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const made = document.createElement(name);
  made.classList.add(...classes);

  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (/^(data-|aria-|role$|for$|scope$)/.test(key)) made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** Replace all that is in a node. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null));
  return node;
}

/** A label around an input, so that its name is what screen readers say. */
export function labeled(text, input) {
  return element("label.field", {}, element("span", {}, text), input);
}

/** A select with [value, text] options. */
export function select(options, value, onchange, properties = {}) {
  const made = element(
    "select",
    { ...properties, onchange: (event) => onchange(event.target.value) },
    options.map(([key, text]) => element("option", { value: key }, text)),
  );
  made.value = value;
  return made;
}

/** Call a function once nothing has asked for it for a while. */
export function debounced(milliseconds, action) {
  let timer = 0;
  return (...parameters) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...parameters), milliseconds);
  };
}
