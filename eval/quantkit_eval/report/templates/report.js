"use strict";
(() => {
  const form = document.getElementById("filter");
  if (!form) return;
  const items = [...document.querySelectorAll("#items details.item")];
  const more = document.getElementById("more");
  const shown = document.getElementById("shown");
  const texts = new Map(items.map((item) => [item, item.textContent.toLowerCase()]));
  const apply = () => {
    const direction = form.elements.direction.value;
    const suite = form.elements.suite.value;
    const text = form.elements.text.value.trim().toLowerCase();
    const filtered = Boolean(direction || suite || text);
    let count = 0;
    for (const item of items) {
      const fits =
        (!direction || item.dataset.direction === direction) &&
        (!suite || item.dataset.suite === suite) &&
        (!text || texts.get(item).includes(text));
      item.hidden = !fits;
      count += fits ? 1 : 0;
    }
    if (more && filtered) more.open = true;
    shown.textContent = filtered ? `${count} of ${items.length} shown` : `${items.length} items`;
  };
  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("expand").addEventListener("click", () => {
    for (const item of items) if (!item.hidden) item.open = true;
    if (more) more.open = true;
  });
  apply();
})();
