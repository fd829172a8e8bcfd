// Puts the page together.

import { wireChat } from "./chat.js";
import { wireConversations } from "./conversations.js";
import { wireKey } from "./key.js";
import { showMemory } from "./memory.js";
import { onOffer } from "./offer.js";
import { wirePanel } from "./panel.js";
import { wirePicture } from "./picture.js";
import { lookNow, watch } from "./server.js";
import { wireSettings } from "./settings.js";
import { wireTabs } from "./tabs.js";
import { reopen, save, talk } from "./talk.js";
import { wireTasks } from "./tasks.js";

wireKey(lookNow);
wirePanel();
onOffer(wireTabs(document.querySelector("[role=tablist]")));
wirePicture();
wireChat();
wireTasks();
wireConversations();
wireSettings((keep) => keep && save(talk()));
reopen();
watch(showMemory);
