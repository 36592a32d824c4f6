// Formatting of numbers and times.

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size < 1e-4) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function ago(seconds) {
  if (seconds === null) return "";
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  if (passed < 90) return `${Math.round(passed)} s ago`;
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  if (passed < 129600) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86400)} days ago`;
}

/** Replace control characters by their Unicode pictures, except line ends and tabs. */
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) =>
    String.fromCharCode(0x2400 + c.charCodeAt(0)),
  );
}
