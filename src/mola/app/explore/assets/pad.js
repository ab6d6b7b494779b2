// The drawing pad. Pictures are decoded by the server alone: what it takes is shown here as the networks get it.
const canvas = element.querySelector("canvas");
const invite = element.querySelector(".invite");
const file = element.querySelector(".file");
const pen = element.querySelector(".pen");
const context = canvas.getContext("2d");
const PAUSE = 180; // milliseconds between looks while a stroke is being drawn
let last = null;
let waiting = null;
let shown = false; // whether the pad shows a picture, which the next stroke wipes away

pen.hidden = !props.coloured;

function wipe() {
  context.fillStyle = "black";
  context.fillRect(0, 0, canvas.width, canvas.height);
  shown = false;
}

function send() {
  clearTimeout(waiting);
  waiting = null;
  trigger("input", { data: canvas.toDataURL("image/png") });
}

function soon() {
  if (waiting === null) waiting = setTimeout(send, PAUSE);
}

function place(event) {
  const box = canvas.getBoundingClientRect();
  return [((event.clientX - box.left) * canvas.width) / box.width, ((event.clientY - box.top) * canvas.height) / box.height];
}

function stroke(from, to) {
  context.strokeStyle = props.coloured ? pen.value : "white";
  context.lineWidth = props.pen;
  context.lineCap = context.lineJoin = "round";
  context.beginPath();
  context.moveTo(...from);
  context.lineTo(...to);
  context.stroke();
}

canvas.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  event.preventDefault();
  canvas.setPointerCapture(event.pointerId);
  if (shown) wipe();
  invite.hidden = true;
  last = place(event);
  stroke(last, last);
  soon();
});
canvas.addEventListener("pointermove", (event) => {
  if (last === null) return;
  const steps = event.getCoalescedEvents ? event.getCoalescedEvents() : [];
  for (const step of steps.length ? steps : [event]) {
    const now = place(step);
    stroke(last, now);
    last = now;
  }
  soon();
});
for (const end of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(end, () => {
    if (last === null) return;
    last = null;
    send();
  });
}

function take(chosen) {
  if (!chosen) return;
  const told = { name: chosen.name, size: chosen.size };
  if (chosen.size > props.limit) {
    trigger("upload", told);
    return;
  }
  const reader = new FileReader();
  reader.onload = () => trigger("upload", { ...told, data: reader.result });
  reader.onerror = () => trigger("upload", told);
  reader.readAsDataURL(chosen);
}

element.querySelector(".choose").addEventListener("click", () => file.click());
file.addEventListener("change", () => {
  take(file.files[0]);
  file.value = ""; // the same file can be chosen again
});
element.querySelector(".clear").addEventListener("click", () => {
  clearTimeout(waiting);
  waiting = null;
  wipe();
  invite.hidden = false;
  trigger("clear");
});

// A file dropped anywhere on the page is meant for the pad, and never replaces the page.
const frame = element.querySelector(".pad");
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  frame.classList.add("over");
});
document.addEventListener("dragleave", (event) => {
  if (event.relatedTarget === null) frame.classList.remove("over");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  frame.classList.remove("over");
  take(event.dataTransfer.files[0]);
});
document.addEventListener("paste", (event) => take(event.clipboardData.files[0]));

window.molaPad = (picture) => {
  if (!picture) return;
  const image = new Image();
  image.onload = () => {
    wipe();
    context.imageSmoothingEnabled = false;
    const scale = Math.min(canvas.width / image.width, canvas.height / image.height);
    const across = image.width * scale;
    const down = image.height * scale;
    context.drawImage(image, (canvas.width - across) / 2, (canvas.height - down) / 2, across, down);
    shown = true;
    invite.hidden = true;
  };
  image.src = picture;
};

wipe();
if (props.first) window.molaPad(props.first);
