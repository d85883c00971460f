// Runs before anything is drawn, so that a page in the dark never flashes white. A classic script for that reason.
{
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const wanted = localStorage.getItem("outrider.theme");
    const theme = wanted === "light" || wanted === "dark" ? wanted : dark.matches ? "dark" : "light";
    if (document.documentElement.dataset.theme === theme) return;
    document.documentElement.dataset.theme = theme;
    document.dispatchEvent(new Event("themechange"));
  };
  apply();
  dark.addEventListener("change", apply);
  document.addEventListener("themewanted", apply);
}
