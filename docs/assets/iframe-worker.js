/* Search when the site is read from the file system: browsers start no workers from file://.
   The search worker then runs in a hidden frame of the page, behind the interface of a worker. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inner = (this.inner = frame.contentWindow)
      // What the worker posts becomes a message of this object.
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inner.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)))
      this.load(url).then(() => {
        for (const data of this.waiting.splice(0)) this.deliver(data)
        this.ready = true
      })
    }
    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inner.document.createElement("script")
        script.src = url
        script.onload = resolve
        script.onerror = reject
        this.inner.document.body.append(script)
      })
    }
    deliver(data) {
      this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }))
    }
    postMessage(data) {
      if (this.ready) this.deliver(data)
      else this.waiting.push(data)
    }
    terminate() {
      this.inner.frameElement.remove()
    }
  }
}
