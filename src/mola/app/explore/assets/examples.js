element.addEventListener("click", (event) => {
  const chosen = event.target.closest("button[data-index]");
  if (chosen) trigger("select", { index: Number(chosen.dataset.index) });
});
