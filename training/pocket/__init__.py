"""How `pocket`, the small vision-language model inside snugvl, is made and measured."""
