"use strict";
{
  const box = document.getElementById("reload");
  setInterval(() => { if (box.checked && !document.hidden) location.reload(); }, 1000 * Number(box.dataset.seconds));
}
