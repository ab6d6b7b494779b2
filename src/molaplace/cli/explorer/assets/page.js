// At most one request is pending. Later changes are sent when it returns, so the last answer matches the controls.
const find = (selector) => element.querySelector(selector);
const canvas = find("canvas"), pad = canvas.getContext("2d"), answer = find(".answer"), note = find(".note");
const sliders = [...element.querySelectorAll("input[type=range]")], invert = find(".invert"), file = find(".file");
let picture = "", drawing = false, last = null, busy = false, again = false;

async function look() {
  sliders.forEach((slider) => (slider.parentElement.querySelector("output").value = slider.value));
  again = true;
  if (busy) return;
  busy = true;
  while (again) {
    again = false;
    const request = { picture: drawing ? canvas.toDataURL("image/png") : picture, invert: invert.checked };
    sliders.forEach((slider) => (request[slider.name] = Number(slider.value)));
    try {
      answer.innerHTML = await server.look(request);
    } catch (error) {
      note.textContent = "The server did not answer. Check that `molaplace explore` is still running.";
    }
  }
  busy = false;
}

function wipe() {
  pad.fillStyle = "black";
  pad.fillRect(0, 0, canvas.width, canvas.height);
}

function show(address, name) {
  const image = new Image();
  image.onload = () => {
    const shrink = Math.min(1, props.side / Math.max(image.width, image.height));
    const copy = document.createElement("canvas"), ink = copy.getContext("2d");
    [copy.width, copy.height] = [image.width, image.height].map((side) => Math.max(1, Math.round(side * shrink)));
    ink.fillStyle = "white"; // behind transparent parts
    ink.fillRect(0, 0, copy.width, copy.height);
    ink.drawImage(image, 0, 0, copy.width, copy.height);
    picture = copy.toDataURL("image/png");
    drawing = false;
    wipe();
    const scale = canvas.width / Math.max(copy.width, copy.height);
    const [width, height] = [copy.width * scale, copy.height * scale];
    pad.imageSmoothingEnabled = scale < 1;
    pad.drawImage(copy, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
    note.textContent = `${name}, ${image.width} x ${image.height} pixels`;
    look();
  };
  image.onerror = () => (note.textContent = `${name} is not an image that this browser can open.`);
  image.src = address;
}

function take(chosen) {
  if (chosen) show(URL.createObjectURL(chosen), chosen.name);
}

function stroke(event) {
  const box = canvas.getBoundingClientRect();
  const now = [((event.clientX - box.left) * canvas.width) / box.width, ((event.clientY - box.top) * canvas.height) / box.height];
  pad.strokeStyle = find(".pen").value;
  pad.lineWidth = props.pen;
  pad.lineCap = "round";
  pad.beginPath();
  pad.moveTo(...(last ?? now));
  pad.lineTo(...now);
  pad.stroke();
  last = now;
  look();
}

canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  if (!drawing) wipe(); // a new drawing starts on an empty pad
  drawing = true;
  stroke(event);
});
canvas.addEventListener("pointermove", (event) => last && event.getCoalescedEvents().concat(event).forEach(stroke));
["pointerup", "pointercancel"].forEach((end) => canvas.addEventListener(end, () => (last = null)));
element.querySelectorAll(".examples button").forEach((example) =>
  example.addEventListener("click", () => show(example.firstElementChild.src, example.title)));
[...sliders, invert].forEach((control) => control.addEventListener("input", look));
find(".choose").addEventListener("click", () => file.click());
file.addEventListener("change", () => take(file.files[0]));
find(".clear").addEventListener("click", () => {
  wipe();
  [picture, drawing] = ["", false];
  look();
});
find(".reset").addEventListener("click", () => {
  sliders.forEach((slider) => (slider.value = slider.defaultValue));
  invert.checked = false;
  look();
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault(); // a dropped file never replaces the page
  take(event.dataTransfer.files[0]);
});
document.addEventListener("paste", (event) => take(event.clipboardData.files[0]));
wipe();
find(".examples button")?.click();
