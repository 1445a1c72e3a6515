"""What is in a fragment of HTML, for tests of what a page shows."""

from html.parser import HTMLParser


class Elements(HTMLParser):
    """The elements of a fragment and the text outside of them."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data
