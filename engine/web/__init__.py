"""What the page is made of: fragments, routes, style and the player."""
