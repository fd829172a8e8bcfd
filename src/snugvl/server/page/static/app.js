// Puts the page together.

import { wireChat } from "./chat.js";
import { wireKey } from "./key.js";
import { showMemory } from "./memory.js";
import { onOffer } from "./offer.js";
import { wirePicture } from "./picture.js";
import { lookNow, watch } from "./server.js";
import { wireTabs } from "./tabs.js";
import { wireTasks } from "./tasks.js";

wireKey(lookNow);
onOffer(wireTabs(document.querySelector("[role=tablist]")));
wirePicture();
wireChat();
wireTasks();
watch(showMemory);
