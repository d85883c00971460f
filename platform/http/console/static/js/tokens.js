// Which part of a streamed text belongs to which token.

const MAX_GAP = 8; // characters: what a token's own text may lack, such as the space that SentencePiece drops
const REPLACEMENT = "\ufffd"; // what a piece of a character looks like alone

/**
 * Splits a text among its tokens as both come. The text is what counts: the pieces together are always exactly it. A
 * token's own text only says where to cut: special tokens have one that is not in the answer, pieces of a character have
 * none, and some of the text may still be held back by the server.
 */
export class TokenSplitter {
  #waiting = []; // tokens whose text has not come yet

  /** `tokens`: new ones, with their own `text`; `content`: new text. Returns [{token, text}]; token may be null. */
  push(tokens, content) {
    this.#waiting.push(...tokens);
    const pieces = [];
    while (content !== "" && this.#waiting.length > 0) {
      const [index, length] = this.#fit(content);
      pieces.push({ token: this.#waiting[index], text: content.slice(0, length) });
      this.#waiting.splice(0, index + 1);
      content = content.slice(length);
    }
    if (content !== "") pieces.push({ token: null, text: content });
    return pieces;
  }

  /** [the waiting token that the text begins with, how much of it]; tokens before that one have no text. */
  #fit(content) {
    const first = this.#waiting[0].text;
    if (first !== "" && content.startsWith(first)) return [0, first.length];
    if (first.startsWith(content)) return [0, content.length]; // the end of the answer cut it
    for (let index = 0; index < this.#waiting.length; index++) {
      const text = this.#waiting[index].text;
      if (text === "" || text.includes(REPLACEMENT)) continue;
      const at = content.indexOf(text);
      if (at < 0 || at > MAX_GAP) continue;
      if (index === 0) return [0, at + text.length];
      // What lies before it is the tokens' before: the pieces of a character are complete with the last of them.
      return at > 0 ? [index - 1, at] : [index, text.length];
    }
    return [this.#waiting.length - 1, content.length];
  }
}
