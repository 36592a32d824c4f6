// Creates elements. Text is always set as text, so that output of a model never becomes markup.

/**
 * Create an element.
 * @param {string} tag such as "td" or "span.soft"
 * @param {object} properties of the element. "on…" adds a listener. "data-…", "aria-…" and "role"
 *   set attributes. A property that is null is left out.
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

/** Replace all children of a node. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null));
  return node;
}

/** Label around an input. Screen readers read it as the input's name. */
export function labeled(text, input) {
  return element("label.field", {}, element("span", {}, text), input);
}

/** Select element with [value, text] options. */
export function select(options, value, onchange, properties = {}) {
  const made = element(
    "select",
    { ...properties, onchange: (event) => onchange(event.target.value) },
    options.map(([key, text]) => element("option", { value: key }, text)),
  );
  made.value = value;
  return made;
}

/** Delay a call until no further call was made for some time. */
export function debounced(milliseconds, action) {
  let timer = 0;
  return (...parameters) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...parameters), milliseconds);
  };
}
