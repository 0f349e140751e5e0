// Makes the columns of tables of class "sortable" into buttons that sort their rows. Without it the plan's order stands.
(() => {
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    const key = (row, column) => row.cells[column].dataset.order;
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
          const order = column === 0 ? x.localeCompare(y) : Number(x) - Number(y);
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
