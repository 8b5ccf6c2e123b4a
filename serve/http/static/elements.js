// DOM elements from data. Text only ever becomes text nodes, never markup.

/** element("p", {class: "quiet"}, "text", child...); a property that is null is left out. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

/** A token's text with its spaces and line ends made visible. */
export function visible(text) {
  if (text === "") return "(no text)";
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

export function number(value, digits = 0) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function percent(share) {
  const digits = share > 0 && share < 0.0995 ? 1 : 0;
  if (share > 0 && share < 0.0005) return "under 0.1 %";
  return `${number(100 * share, digits)} %`;
}
