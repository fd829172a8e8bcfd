"""How `pocket`, the small vision-language model inside snugvl, is made: world, drawing, training, measuring."""
