// Copies text to the clipboard.

import { element } from "./dom.js";

async function copy(text) {
  // The clipboard exists only in secure contexts, such as localhost.
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const field = element("textarea", { value: text });
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  if (!isCopied) throw new Error("the browser does not allow copying");
}

/** Create a button that copies the text that a function returns. */
export function copyButton(title, label, text) {
  const button = element("button.copy", { type: "button", title: label, "aria-label": label }, title);
  button.addEventListener("click", async () => {
    try {
      await copy(text());
      button.textContent = "Copied";
    } catch (error) {
      button.textContent = error.message;
    }
    setTimeout(() => (button.textContent = title), 1500);
  });
  return button;
}
