"use strict";
document.querySelectorAll("table.sortable").forEach(function (table) {
  const body = table.tBodies[0];
  const heads = Array.from(table.tHead.rows[0].cells);
  function value(row, column) {
    const text = row.cells[column].dataset.sort;
    const number = Number(text);
    return text === "" ? -Infinity : Number.isNaN(number) ? text : number;
  }
  function compare(a, b) {
    if (typeof a === "number" && typeof b === "number") return a === b ? 0 : a - b;
    return String(a).localeCompare(String(b));
  }
  heads.forEach(function (head, column) {
    head.querySelector("button").addEventListener("click", function () {
      const numbers = Array.from(body.rows).some(function (row) { return typeof value(row, column) === "number"; });
      const now = head.getAttribute("aria-sort");
      const down = now ? now === "ascending" : numbers;
      heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = Array.from(body.rows);
      rows.sort(function (a, b) { return (down ? -1 : 1) * compare(value(a, column), value(b, column)); });
      rows.forEach(function (row) { body.appendChild(row); });
    });
  });
});
document.querySelectorAll("button.copy").forEach(function (button) {
  button.addEventListener("click", function () {
    const code = button.parentElement.querySelector("code");
    const range = document.createRange();
    range.selectNodeContents(code);
    const selection = window.getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    const written = navigator.clipboard ? navigator.clipboard.writeText(code.textContent) : Promise.reject();
    written.then(function () { return true; }, function () { return document.execCommand("copy"); }).then(function (done) {
      button.textContent = done ? "copied" : "selected";
      setTimeout(function () { button.textContent = "copy"; }, 1500);
    });
  });
});
