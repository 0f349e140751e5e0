// Makes the columns of tables of class "sortable" into buttons that sort their rows. Without it the plan's order stands.
// A cell is sorted by its data-order, where it has one; else by its text, or the first number in it if its class is so.
(() => {
  const number = /[-+]?\d+(\.\d+)?(e[-+]?\d+)?/;
  const key = (row, column) => {
    const cell = row.cells[column];
    let told = cell.dataset.order ?? cell.textContent.trim();
    if (cell.dataset.order === undefined && cell.classList.contains("number")) told = number.exec(told)?.[0] ?? "";
    return told !== "" && Number.isFinite(Number(told)) ? Number(told) : told;
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const rising = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", rising ? "ascending" : "descending");
        const sorted = rows.slice().sort((a, b) => {
          const [x, y] = [key(a, column), key(b, column)];
          if (x === "" || y === "") return (x === "") - (y === "");
          const numbers = typeof x === "number" && typeof y === "number";
          const order = numbers ? x - y : String(x).localeCompare(String(y));
          return rising ? order : -order;
        });
        body.append(...sorted);
      });
    });
  }
  addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("details")) folded.open = true;
  });
})();
