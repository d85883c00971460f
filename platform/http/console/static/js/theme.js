// The switch between the system's colours, light and dark; remembered by the browser.

const STORED = "outrider.theme";

export function setUpTheme(select) {
  select.value = localStorage.getItem(STORED) ?? "auto";
  select.addEventListener("change", () => {
    if (select.value === "auto") localStorage.removeItem(STORED);
    else localStorage.setItem(STORED, select.value);
    document.dispatchEvent(new Event("themewanted"));
  });
}

/** The value of a colour of the stylesheet, as it is now. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
