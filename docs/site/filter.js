// A field above each long table (docs/models.md) that shows only the rows with its words.
for (const table of document.querySelectorAll("article table")) {
  const rows = [...table.tBodies[0].rows];
  if (rows.length < 100) continue;
  const field = document.createElement("input");
  field.className = "filter";
  field.type = "search";
  field.placeholder = `Filter these ${rows.length} rows`;
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  });
  (table.closest(".md-typeset__scrollwrap") ?? table).before(field);
}
