// Light or dark: as the system says, until the button is pressed.
document.addEventListener("click", (event) => {
  if (event.target.closest("button.theme")) document.body.classList.toggle("dark");
});
